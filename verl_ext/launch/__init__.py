# SPDX-License-Identifier: Apache-2.0
"""Runs on a cluster: waiting for its nodes, submitting runs as jobs of Ray or Slurm, following them.

Imports neither verl nor torch; Ray only where it is used.
"""
