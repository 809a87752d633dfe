# SPDX-License-Identifier: Apache-2.0
"""What a person sees of runs: tables, plots, statistical tests and pages, of one run or of several side by side.

Reads run folders through `verl_ext.runs`. Starts no run: that is `verl_ext.launch`.
"""
