"""Data sets in verl's format: downloaded or read from local files, folded, checked, and keyed as the prompt pool does.

`python -m verl_ext.data.dapo_math_17k` and `.validation_sets` for mathematics; `.gsm8k` and `.countdown` beside them.
"""
