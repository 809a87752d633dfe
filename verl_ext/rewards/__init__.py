"""Verifiable rewards with verl's `compute_score` signature."""
