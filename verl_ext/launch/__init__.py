# SPDX-License-Identifier: Apache-2.0
"""How runs start and end on machines: Ray, Slurm, nodes, processes, and many runs one after another.

Imports neither verl nor torch; Ray only where it is used.
"""
