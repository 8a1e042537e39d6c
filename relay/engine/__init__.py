"""Continuous batching over a runner: sequences, steps, sampling."""
