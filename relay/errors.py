"""Every error of the project, once: the caller's situation is the class, the HTTP status and the stable `code` come with it.

Three branches: `RequestError` is the client's to see (OpenAI-shaped JSON or an SSE error event), `StartError` is the operator's (one
clear line from the command line, exit status 1), `RuntimeFault` is ours (links, lanes, engines) and turns into one of the others or into
a worker's death at an outer edge.
"""

from typing import ClassVar


def first_cause(error: Exception) -> Exception:
    """The first of the exceptions that nurseries have wrapped."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class RelayError(Exception):
    """Base of all of them. The text says what was wrong, what was expected, and what to do."""


class RequestError(RelayError):
    """A request that is answered with an error. `param` names the field at fault, `retry_after_s` when to come again."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The body or a header says something that cannot be served as it stands."""

    status, kind, code = 400, "invalid_request_error", "invalid_request"


class ContextTooLong(RequestError):
    """Prompt and asked-for tokens exceed what the model or any worker's memory can ever hold."""

    status, kind, code = 400, "invalid_request_error", "context_length_exceeded"


class Unauthorized(RequestError):
    """No key, or one that is not known."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(RequestError):
    """The key is known and does not reach this route."""

    status, kind, code = 403, "permission_error", "forbidden"


class NotFound(RequestError):
    """No such route, request or ledger."""

    status, kind, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(RequestError):
    """The body names a model that is not served here."""

    status, kind, code = 404, "invalid_request_error", "model_not_found"


class MethodNotAllowed(RequestError):
    """The route exists for other methods, which the answer's `Allow` header names."""

    status, kind, code = 405, "invalid_request_error", "method_not_allowed"

    allowed: tuple[str, ...] = ()


class RequestTimeout(RequestError):
    """The client did not send the whole body in time."""

    status, kind, code = 408, "invalid_request_error", "request_timeout"


class BodyTooLarge(RequestError):
    """The body is over the cap; it was not read further."""

    status, kind, code = 413, "invalid_request_error", "body_too_large"


class RequestTooLarge(RequestError):
    """What it takes to serve the request is over a limit of bytes, though its body is not."""

    status, kind, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMediaType(RequestError):
    """The body is no JSON by its Content-Type, or is compressed."""

    status, kind, code = 415, "invalid_request_error", "unsupported_media_type"


class HttpVersionNotServed(RequestError):
    """The request came by a version of HTTP that is not served here."""

    status, kind, code = 505, "invalid_request_error", "http_version_not_supported"


class RateLimited(RequestError):
    """This key has used its share for now."""

    status, kind, code = 429, "rate_limit_error", "rate_limit_exceeded"


class Overloaded(RequestError):
    """The queue is full or the wait in it was too long; nothing was started."""

    status, kind, code = 503, "overloaded_error", "overloaded"


class Draining(RequestError):
    """The server is going down and takes nothing new."""

    status, kind, code = 503, "overloaded_error", "draining"


class Unavailable(RequestError):
    """Workers died under this request more often than it may be tried again."""

    status, kind, code = 503, "server_error", "worker_lost"


class PoisonRequest(RequestError):
    """This very request kills whatever computes it, or makes its numbers overflow; trying it again would only do it again. No 5xx, which
    clients repeat by themselves."""

    status, kind, code = 422, "invalid_request_error", "poison_request"


class StreamLost(RequestError):
    """A stream that was to be resumed is not there any more: its time ran out, or what remembered it died."""

    status, kind, code = 410, "invalid_request_error", "stream_lost"


class DeadlineExceeded(RequestError):
    """The time that the client gave ran out."""

    status, kind, code = 504, "timeout_error", "deadline_exceeded"


class ClientGone(RequestError):
    """Nobody is left to answer; only logs and the ledger see it."""

    status, kind, code = 499, "invalid_request_error", "client_closed_request"


class StartError(RelayError):
    """The server cannot start as configured."""


class ConfigError(StartError):
    """The YAML is wrong: the text names the key, what was expected, and the nearest known name."""


class SourceError(StartError):
    """The model cannot be had: offline, missing in the package, or its sha256 differs."""


class ModelError(StartError):
    """The model is not one that is served: unknown architecture, tensor type, tokenizer, or a tensor is missing."""


class KernelsUnavailable(StartError):
    """The native kernels cannot be had here: no compiler, another processor, or a model that they do not cover. The reference serves."""


class TooManyRestarts(StartError):
    """A worker died more than `max_restarts` times in `within_s`, and nobody else serves its role: the server stops rather than flap."""


class RuntimeFault(RelayError):
    """Base of the runtime's own faults."""


class LaneFull(RuntimeFault):
    """`post` found no credit: the receiver is slow. Merge, refuse, or use `send`."""


class FrameTooLarge(RuntimeFault):
    """A peer announced a frame above the limit: the connection is closed."""


class EngineDied(RuntimeFault):
    """The compute thread raised; its actor, and so its worker, ends with it."""
