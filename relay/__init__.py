"""RelayServe: an actor-model LLM inference server with disaggregated prefill and decode."""

__version__ = "0.1.0"
