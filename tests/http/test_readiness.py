"""Whether the server says that it is ready, by what its workers answer."""

import trio
import trio.testing

from relay.http.generate import Served
from relay.http.records import Records
from relay.http.routes import ServerRoutes
from relay.runtime.frames import Answers


def test_a_router_that_is_being_replaced_is_no_outage_and_one_that_stays_away_is() -> None:
    answers: dict[str, bytes] = {}

    async def ask(kind: str, body: bytes, deadline_s: float) -> Answers:
        return Answers(ask_id=1, answers=dict(answers), silent=())

    async def main() -> None:
        routes = ServerRoutes(ask, Records(1), Served(name="m", max_context=1, created=0))
        assert await routes.why_not_ready() == "the router does not answer"
        answers["router-0"] = b"no"
        assert await routes.why_not_ready() == "workers are starting"
        answers["router-0"] = b"yes"
        assert await routes.why_not_ready() == ""
        answers.clear()
        await trio.sleep(4)
        assert await routes.why_not_ready() == ""
        await trio.sleep(2)
        assert await routes.why_not_ready() == "the router does not answer"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
