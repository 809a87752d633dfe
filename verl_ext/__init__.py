# SPDX-License-Identifier: Apache-2.0
"""verl_ext: a plugin for verl that decides where rollouts go in RLVR post-training."""

__version__ = "0.1.0"
