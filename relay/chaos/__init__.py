"""Chaos on real processes: load from real clients, kills of real workers, and a table of what was lost. Nothing should be."""
