"""An error as the client sees it: a `RequestError` in; status, headers and an OpenAI-shaped JSON body out."""

import math

import msgspec

from relay.errors import MethodNotAllowed, PoisonRequest, RequestError
from relay.openai.jsontext import json_value

_SHORTEST_RETRY_S = 1


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def error_body(error: RequestError, request_id: str) -> bytes:
    """For a response; `relay.openai.stream.error_event` frames the same for a stream that has begun."""
    param = None if error.param is None else _sendable(error.param)
    return json_value(_Body(_Error(_sendable(error.message), error.kind, param, error.code, request_id)))


def error_headers(error: RequestError) -> dict[str, str]:
    """What the status asks for beside Content-Type: when to come again, or not to, or how to authenticate."""
    if error.status in (429, 503):
        wait_s = error.retry_after_s or 0
        return {"Retry-After": str(max(_SHORTEST_RETRY_S, math.ceil(wait_s)))}
    if isinstance(error, PoisonRequest):
        return {"X-Should-Retry": "false"}  # OpenAI's clients heed it, whatever the status
    if isinstance(error, MethodNotAllowed):
        return {"Allow": ", ".join(error.allowed)}
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {}


def _sendable(text: str) -> str:
    """Error texts may quote a path or a header that was not UTF-8."""
    return text.encode("utf-8", "replace").decode()
