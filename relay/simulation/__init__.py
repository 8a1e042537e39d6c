"""The whole server in one process on virtual time, its faults drawn from a seed: the same actors, engine, book and node that serve."""
