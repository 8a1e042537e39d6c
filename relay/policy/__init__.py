"""Decisions without I/O: admission, placement, what goes into a step."""
