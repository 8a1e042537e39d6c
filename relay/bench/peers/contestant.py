"""Who takes part: a server that can be started by one command, and what is told of it."""

import msgspec


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is short and stable, `name` is for people; `family` is ours, llama or vllm.

    `ready` is the path that answers 200 once it serves; `environment` is what is added to ours."""

    key: str
    family: str
    name: str
    version: str
    command: list[str]
    url: str
    ready: str = "/health"
    environment: dict[str, str] = {}
