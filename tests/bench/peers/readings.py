"""Readings and records for tests of what is made of them."""

from relay.bench.peers.record import Facts, Record
from relay.bench.peers.rounds import Reading
from relay.bench.peers.server import Server

FACTS = Facts(
    date="2026-11-30T01:02:03+00:00",
    commit="abc1234",
    cores=2,
    processor="A processor",
    instructions=["avx2"],
    memory_gib=23.5,
    kernel="6.1",
    python="3.11.7",
)


def reading(server: str, load: str, round_number: int = 0, *, others: float = 0.0, failed: int = 0, **figures: float) -> Reading:
    return Reading(
        server=server,
        load=load,
        round_number=round_number,
        figures=figures,
        failed=failed,
        short=0,
        load_average=1.5,
        memory_gb_per_s=12.0,
        others=others,
        steal=0.0,
        cpu_us_per_token=8000,
        generator="",
        command=["python", "-m", "relay", "bench", "http://127.0.0.1:1", "--concurrency", "1"],
    )


def record(readings: list[Reading]) -> Record:
    """Of ours and llama.cpp."""
    servers = [
        Server(key="a16", name="Ours", version="1", command=["serve", "a16"], url="http://127.0.0.1:1"),
        Server(key="llama", name="llama.cpp", version="2", command=["serve", "llama"], url="http://127.0.0.1:2"),
    ]
    absent = {"vllm": "it does not\nstart here"}
    return Record(facts=FACTS, model="a model", threads=2, servers=servers, absent=absent, readings=readings)
