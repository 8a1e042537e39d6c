"""Ledgers of ended requests, asked for at once."""

from collections.abc import MutableMapping
from typing import Any

import trio
import trio.testing

from relay.http.body_budget import BodyBudget
from relay.http.exchange import Exchange
from relay.http.records import Question, Records, record


async def _nothing() -> MutableMapping[str, Any]:
    return {"type": "http.disconnect"}


async def _sent(message: MutableMapping[str, Any]) -> None:
    await trio.lowlevel.checkpoint()


def test_a_ledger_asked_for_after_the_last_byte_is_waited_for() -> None:
    """The client has read everything; the request has yet to end here."""

    async def main() -> None:
        records, exchange = (
            Records(4),
            Exchange({"path": "/v1/completions", "headers": []}, _nothing, _sent, "r1", BodyBudget(1, 1)),
        )
        records.opened(exchange)
        question = Question("r1", None)
        with trio.fail_after(60):
            await records.until_over(question)  # it runs: there is nothing to wait for
        assert records.ours(question) is None
        async with trio.open_nursery() as nursery:
            await exchange.respond(200, b"{}")
            asked = trio.Event()

            async def ask() -> None:
                asked.set()
                await records.until_over(question)
                assert records.ours(question) is not None

            nursery.start_soon(ask)
            await asked.wait()
            await trio.testing.wait_all_tasks_blocked()
            records.keep(record(exchange))
            records.dropped(exchange)
            exchange.over.set()

    trio.run(main)
