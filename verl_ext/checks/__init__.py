# SPDX-License-Identifier: Apache-2.0
"""What is looked at before a run starts: settings, data, model, reward, and the cluster.

`verl_ext.main_ppo` makes the checks that need no cluster before Ray starts, `python -m verl_ext.check` makes all of
them and prints each. Nothing of verl is imported by importing this package.
"""

from .findings import Checks, Finding, Problems, State

__all__ = ["Checks", "Finding", "Problems", "State"]
