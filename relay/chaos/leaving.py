"""How long blocks are held for a client that has left: `python -m relay.chaos.leaving CONFIG ROUNDS` (`scripts/measure_cancel`)."""

import json
import random
import socket
import sys
import time
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlsplit

import click

from relay.chaos.server import ServerUnderTest

_GIVE_UP_S = 30.0


def leave(server: ServerUnderTest, draw: random.Random, *, in_prefill: bool) -> float:
    """Milliseconds from closing the connection of a stream until no block is held. Looking takes a few of them, and they count."""
    words = draw.randint(600, 1200) if in_prefill else draw.randint(20, 100)
    body = json.dumps({"prompt": [draw.randint(1000, 40000) for _ in range(words)], "max_tokens": 500, "stream": True, "ignore_eos": True})
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        if in_prefill:
            while server.blocks_held() == 0:
                pass
            time.sleep(draw.uniform(0.0, 0.2))
        else:
            n_events = draw.randint(2, 40)
            while n_events > 0:
                n_events -= sock.recv(1 << 16).count(b"data: ")
        left = time.perf_counter()
    while server.blocks_held() != 0:
        if time.perf_counter() - left > _GIVE_UP_S:
            raise SystemExit(f"blocks are still held {_GIVE_UP_S:g} s after the client left: {server.log()[-2000:]}")
    return 1e3 * (time.perf_counter() - left)


def main(config: Path, rounds: int) -> None:
    draw = random.Random(1)
    with ServerUnderTest(config) as server:
        for warm in (True, False):
            leave(server, draw, in_prefill=warm)
        took = {which: [leave(server, draw, in_prefill=which == "prefill") for _ in range(rounds // 2)] for which in ("prefill", "decode")}
    row: dict[str, float | int | str] = {"config": str(config), "rounds": rounds}
    for which, times in took.items():
        cuts = quantiles(times, n=100)
        row |= {f"{which}_ms_p50": round(cuts[49], 1), f"{which}_ms_p99": round(cuts[98], 1), f"{which}_ms_max": round(max(times), 1)}
    click.echo(json.dumps(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
