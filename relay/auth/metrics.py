"""What each key uses and is refused. Labels are names out of the key file, never what a client sent, so their number is bounded."""

from prometheus_client import CollectorRegistry, Counter


class KeyMetrics:
    """Kept in the gateway's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("relay_key_requests", "Answered generation requests", ["key", "status"], registry=registry)
        self._tokens = Counter("relay_key_tokens", "Tokens of answered requests", ["key", "kind"], registry=registry)
        self._limited = Counter("relay_key_limited", "Requests that a limit of the key refused", ["key", "limit"], registry=registry)
        self._refused = Counter("relay_auth_refused", "Requests refused for want of a right", ["status"], registry=registry)
        for status in ("401", "403"):
            self._refused.labels(status=status)

    def ended(self, key: str, status: int, n_prompt: int, n_generated: int) -> None:
        self._requests.labels(key=key, status=str(status)).inc()
        self._tokens.labels(key=key, kind="prompt").inc(n_prompt)
        self._tokens.labels(key=key, kind="generated").inc(n_generated)

    def unread(self, key: str, n_generated: int) -> None:
        """Tokens of a stream whose client had left it, beyond those that it was sent."""
        self._tokens.labels(key=key, kind="generated").inc(n_generated)

    def limited(self, key: str, limit: str) -> None:
        self._limited.labels(key=key, limit=limit).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(status=str(status)).inc()
