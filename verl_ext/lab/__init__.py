"""A laboratory of real learning: the project's rules around a small policy and real gradients, in one process."""
