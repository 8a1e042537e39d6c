"""What is asked at the edges of the API: probes, paths as people write them, what a body is said to be, IDs as they are shown."""

import codecs
import json

import pytest

from relay import __version__
from tests.http.test_server import raw
from tests.running import RunningServer

BODY = {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}
JSON = json.dumps(BODY).encode()


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_probes_made_for_other_servers_find_what_they_look_for(server: RunningServer, path: str) -> None:
    response = server.http.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert server.http.head(path).status_code == 200


def test_the_version_is_told(server: RunningServer) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/v1//completions", "/v1/completions//"])
def test_slashes_that_say_nothing_do_not_count(server: RunningServer, path: str) -> None:
    assert raw(server, b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(JSON)) + JSON).startswith(
        b"HTTP/1.1 200 OK"
    )


def test_the_list_of_models_may_end_in_a_slash(server: RunningServer) -> None:
    assert server.http.get("/v1/models/").json() == server.http.get("/v1/models").json()


@pytest.mark.parametrize(
    "path", ["/admin%2fworkers", "/admin%2Fworkers", "//admin/workers", "/admin//workers", "/debug/kv/", "/%2fdebug/kv"]
)
def test_the_inside_of_the_server_has_one_path_only(server: RunningServer, path: str) -> None:
    """Which a filter in front can look for."""
    answer = raw(server, b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 403")), answer


def test_an_encoded_slash_in_a_models_name_is_part_of_it(server: RunningServer) -> None:
    error = server.http.get("/v1/models/some%2Fother").json()["error"]
    assert error["code"] == "model_not_found"
    assert "`some/other`" in error["message"]


def test_whoever_names_another_host_is_not_on_this_machine(server: RunningServer) -> None:
    answer = raw(server, b"GET http://evil.example/admin/workers HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403"), answer


def test_a_long_path_is_not_said_again(server: RunningServer) -> None:
    for method in ("GET", "PUT"):
        response = server.http.request(method, "/v1/requests/" + "x" * 20_000)
        assert response.status_code in (404, 405)
        assert len(response.content) < 1000


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json"},
        {"Content-Type": "Application/JSON; Charset=UTF-8"},
        {"Content-Type": "application/vnd.api+json"},
        {"Content-Type": "application/json", "Content-Encoding": "identity"},
        {},
    ],
)
def test_json_is_served(server: RunningServer, headers: dict[str, str]) -> None:
    assert server.http.post("/v1/completions", content=JSON, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"Content-Type": "text/plain"}, "text/plain"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "application/x-www-form-urlencoded"),
        ({"Content-Type": "application/json; charset=iso-8859-1"}, "iso-8859-1"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "gzip"),
        ({"Content-Type": "application/json", "Content-Encoding": "identity, br"}, "br"),
        ({"Origin": "http://evil.example"}, "no Content-Type"),
    ],
)
def test_what_is_said_to_be_something_else_is_refused_by_name(server: RunningServer, headers: dict[str, str], named: str) -> None:
    """A page of another origin may send everything but JSON without asking, and would make the server work."""
    response = server.http.post("/v1/completions", content=JSON, headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    assert named in response.json()["error"]["message"]


def test_a_byte_order_mark_is_skipped_and_utf_16_is_named(server: RunningServer) -> None:
    assert server.http.post("/v1/completions", content=codecs.BOM_UTF8 + JSON).status_code == 200
    response = server.http.post("/v1/completions", content=JSON.decode().encode("utf-16"))
    assert response.status_code == 400
    assert "UTF-16" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_ledger_is_found_by_the_answers_id(server: RunningServer, path: str) -> None:
    body = BODY if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    response = server.http.post(path, json=body)
    found = server.http.get(f"/v1/requests/{response.json()['id']}/ledger")
    assert found.status_code == 200
    assert found.json() == server.http.get(f"/v1/requests/{response.headers['x-request-id']}/ledger").json()
