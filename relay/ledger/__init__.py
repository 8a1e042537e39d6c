"""Where a request's wall time went, span by span, and the metrics of each process."""
