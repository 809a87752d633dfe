# SPDX-License-Identifier: Apache-2.0
"""A run's folder, written and read: configuration, metrics, ledger, outcomes, versions and machine.

Imports no verl, Ray or torch. Reports and comparisons read a run through this package only.
"""
