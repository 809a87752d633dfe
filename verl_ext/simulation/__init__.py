"""A population of prompts with latent success rates, in place of an engine."""
