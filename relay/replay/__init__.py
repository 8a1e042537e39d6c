"""Loads replayed on virtual time: the actors, engines and books that serve, with steps that take the time of a measured machine."""
