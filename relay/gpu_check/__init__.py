"""One command for a machine with a GPU: what is right there, and how fast it is. Needs torch, CuPy and numpy; some sections more."""
