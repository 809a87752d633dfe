# SPDX-License-Identifier: Apache-2.0
"""What runs inside verl's rollout workers: groups carried over several requests, scored, stored and aborted.

The driver's side is in `verl_ext.training`. Nothing here decides which prompt gets how many rollouts.
"""
