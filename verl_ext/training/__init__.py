"""The verl side of allocation: trainer mode, rollout workers, a backend over TransferQueue. Subclasses, registries."""
