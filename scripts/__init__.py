"""Generators of documentation, run from the repository, beside the scripts that start things."""
