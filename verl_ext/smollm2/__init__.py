"""A pre-trained language model of 135 million parameters that learns sums on a laptop: SmolLM2-135M-Instruct."""
