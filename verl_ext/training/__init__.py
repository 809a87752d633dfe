# SPDX-License-Identifier: Apache-2.0
"""The driver's side of verl: the trainer mode `allocated`, its batches, checkpoints and settings, by subclasses.

What runs inside verl's rollout workers is in `verl_ext.rollout`, what is known before a start in `verl_ext.checks`.
"""
