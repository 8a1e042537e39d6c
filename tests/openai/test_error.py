"""Errors as clients see them."""

import json

import pytest

from relay import errors
from relay.openai.error import error_body, error_headers


def leaves(kind: type[errors.RequestError]) -> list[type[errors.RequestError]]:
    return [kind] + [leaf for child in kind.__subclasses__() for leaf in leaves(child)]


@pytest.mark.parametrize("kind", leaves(errors.RequestError))
def test_every_error_has_openais_shape(kind: type[errors.RequestError]) -> None:
    body = json.loads(error_body(kind('no "good"\n', param="messages[0]"), "r1"))
    assert body == {
        "error": {"message": 'no "good"\n', "type": kind.kind, "param": "messages[0]", "code": kind.code, "request_id": "r1"},
    }


def test_param_is_null_where_no_field_is_at_fault() -> None:
    assert json.loads(error_body(errors.Draining("bye"), "r1"))["error"]["param"] is None


def test_text_that_was_never_utf8_is_sent_lossy() -> None:
    """JustVugg/colibri#1589: a lone surrogate must not turn an error into another one."""
    assert json.loads(error_body(errors.NotFound("no route /\udcff"), "r"))["error"]["message"] == "no route /?"


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (errors.RateLimited("x", retry_after_s=1.2), {"Retry-After": "2"}),
        (errors.Overloaded("x", retry_after_s=0.01), {"Retry-After": "1"}),
        (errors.Draining("x"), {"Retry-After": "1"}),
        (errors.Unauthorized("x"), {"WWW-Authenticate": "Bearer"}),
        (errors.InvalidRequest("x"), {}),
    ],
)
def test_headers_say_when_to_come_again_and_how_to_authenticate(error: errors.RequestError, headers: dict[str, str]) -> None:
    """vllm#18892: 401 came without WWW-Authenticate."""
    assert error_headers(error) == headers
