"""The native engine: weights packed for the kernels, shared by all workers of a host, and the runner that computes with them."""
