# SPDX-License-Identifier: Apache-2.0
"""Recipes side by side: runs over several seeds, statistics, and one report.

    python -m verl_ext.compare recipes=[cpu/grpo,cpu/sara] seeds=[0,1,2]

Reads run folders only; imports no verl, Ray or torch.
"""
