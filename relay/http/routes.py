"""Routes about the server: models, health, metrics, ledgers, KV pools. Each answers for the whole server, whichever gateway is asked."""

import math
import re
from collections.abc import Awaitable, Callable

import msgspec
import trio

from relay import __version__
from relay.errors import Forbidden, InvalidRequest, ModelNotFound, NotFound
from relay.http.exchange import Exchange
from relay.http.generate import Served
from relay.http.records import Question, Records, newest
from relay.ledger.metrics import Family, render
from relay.openai.models import Model, model_card, model_list
from relay.runtime.asks import SUPERVISOR
from relay.runtime.frames import Answers

_ANSWER_WITHIN_S = 1.0
_ROUTER_BACK_WITHIN_S = 5.0
_ARMED_WITHIN_S = 10.0  # a busy worker's answer counts as well
_ANSWER_ID = re.compile(r"(?:chatcmpl|cmpl)-(r[0-9a-f]{10}-.+)")  # of an answer's body: our ID of its request, behind what kind it is
_FAMILIES = msgspec.msgpack.Decoder(list[Family])

Ask = Callable[[str, bytes, float], Awaitable[Answers]]


class ServerRoutes:
    """`ask` reaches every worker; who does not answer in time is named, never left out in silence."""

    def __init__(self, ask: Ask, records: Records, served: Served, *, allow_faults: bool = False) -> None:
        self._allow_faults = allow_faults
        self._ask, self._records, self._served = ask, records, served
        self._ready_s = -math.inf  # when a router last said so
        self.is_draining: Callable[[], bool] = lambda: False

    def table(self) -> dict[str, Callable[[Exchange], Awaitable[None]]]:
        return {
            "GET /healthz": self.healthz,
            "GET /readyz": self.readyz,
            "GET /health": self.health,
            "GET /ping": self.health,
            "GET /version": self.version,
            "GET /metrics": self.metrics,
            "GET /v1/models": self.models,
            "GET /v1/models/{name:path}": self.model,
            "GET /v1/requests/{id}/ledger": self.ledger,
            "GET /debug/kv": self.kv,
            "GET /admin/workers": self.workers,
            "POST /admin/workers/{name}/drain": self.drain_worker,
            "POST /admin/faults": self.fault,
        }

    async def healthz(self, exchange: Exchange) -> None:
        """This process turns."""
        await exchange.respond(200, b'{"status":"ok"}')

    async def health(self, exchange: Exchange) -> None:
        """What readyz says, where probes made for other servers look; open, so it names no worker."""
        why = await self.why_not_ready()
        body = {"status": "unavailable", "reason": why} if why else {"status": "ok"}
        await exchange.respond(503 if why else 200, msgspec.json.encode(body), headers={"Retry-After": "1"} if why else None)

    async def version(self, exchange: Exchange) -> None:
        await exchange.respond(200, msgspec.json.encode({"version": __version__}))

    async def readyz(self, exchange: Exchange) -> None:
        """200 only if a request would be served: a router is there and has a prefill and a decode worker to place on. Names those of which
        the server has to do without for a while, since they died too often."""
        why, resting = await self._unready()
        if why:
            await exchange.respond(503, msgspec.json.encode({"status": "unavailable", "reason": why}), headers={"Retry-After": "1"})
        else:
            await exchange.respond(200, msgspec.json.encode({"status": "ready", **({"resting": resting} if resting else {})}))

    async def why_not_ready(self) -> str:
        """Empty if a request would be served."""
        return (await self._unready())[0]

    async def _unready(self) -> tuple[str, list[str]]:
        """Why no request would be served, empty if one would; and the workers that rest."""
        if self.is_draining():
            return "draining", []
        answers = await self._ask("ready", b"", _ANSWER_WITHIN_S)
        resting = msgspec.json.decode(answers.answers.get(SUPERVISOR, b"[]"), type=list[str])
        if b"yes" in answers.answers.values():
            self._ready_s = trio.current_time()
            return "", resting
        if b"no" not in answers.answers.values() and trio.current_time() - self._ready_s < _ROUTER_BACK_WITHIN_S:
            return "", resting  # it is being replaced: a request waits for it, and is served
        return "workers are starting" if b"no" in answers.answers.values() else "the router does not answer", resting

    async def metrics(self, exchange: Exchange) -> None:
        answers = await self._ask("metrics", b"", _ANSWER_WITHIN_S)
        by_worker = [(worker, _FAMILIES.decode(body)) for worker, body in sorted(answers.answers.items())]
        silent = Family(
            "relay_scrape_silent",
            "gauge",
            "Workers that did not answer this scrape",
            [("relay_scrape_silent", {"silent": worker}, 1.0) for worker in answers.silent],
        )
        page = await trio.to_thread.run_sync(render, [*by_worker, ("supervisor", [silent])])
        await exchange.respond(200, page, content_type=b"text/plain; version=0.0.4; charset=utf-8")

    async def models(self, exchange: Exchange) -> None:
        await exchange.respond(200, model_list([self._model()] if exchange.caller.may_use(self._served.name) else []))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["name"].replace("%2F", "/")
        if name != self._served.name:
            raise ModelNotFound(f"the model `{name}` is not served here; `{self._served.name}` is", param="model")
        exchange.caller.check_model(name)
        await exchange.respond(200, model_card(self._model()))

    async def ledger(self, exchange: Exchange) -> None:
        """Where a request's time went, by our ID, the client's or the answer's. A key without the admin scope sees its own only."""
        name = exchange.scope["path_params"]["id"]
        if found := _ANSWER_ID.fullmatch(name):
            name = found[1]
        question = Question(name, exchange.caller.sees_only)
        await self._records.until_over(question)
        body = self._records.ours(question)  # its ID is unique; one of a client may have a later request at another gateway
        if body is None:
            answers = await self._ask("ledger", msgspec.msgpack.encode(question), _ANSWER_WITHIN_S)
            body = newest(answers.answers.values())
            if body is None:
                raise NotFound(self._not_kept(question, answers.silent))
        await exchange.respond(200, body)

    def _not_kept(self, question: Question, silent: tuple[str, ...]) -> str:
        whose = "" if question.sees_only is None else f" of the API key `{question.sees_only}`"
        missing = [worker for worker in silent if worker.startswith(("gateway-", SUPERVISOR))]
        unsaid = f"; no answer came from {', '.join(missing)}" if missing else ""
        return f"no ended request `{question.name}`{whose} is on record; the last {self._records.limit} of each gateway are{unsaid}"

    async def kv(self, exchange: Exchange) -> None:
        """Every pool's blocks by state, and whether they add up."""
        answers = await self._ask("kv", b"", _ANSWER_WITHIN_S)
        pools = {worker: msgspec.json.decode(body) for worker, body in sorted(answers.answers.items())}
        await exchange.respond(200, msgspec.json.encode({"pools": pools, "silent": answers.silent}))

    async def fault(self, exchange: Exchange) -> None:
        """For chaos tests: arm a fault (`relay.faults`). Answers when it is armed."""
        if not self._allow_faults:
            raise Forbidden("this server's config does not say runtime.allow_faults")
        body = await exchange.read_body(1 << 16, _ANSWER_WITHIN_S)
        answers = await self._ask("fault", body, _ARMED_WITHIN_S)
        if b"armed" not in answers.answers.values():
            raise InvalidRequest("no worker armed this fault; see `relay.faults` for what it may be")
        await exchange.respond(202, b'{"armed":true}')

    async def workers(self, exchange: Exchange) -> None:
        """The process table: every worker's pid, epoch, restarts, state and last death; and the pids of spare processes."""
        answers = await self._ask("admin.processes", b"", _ANSWER_WITHIN_S)
        await exchange.respond(200, answers.answers.get(SUPERVISOR, b'{"workers":[],"spares":[]}'))

    async def drain_worker(self, exchange: Exchange) -> None:
        """Restart one worker without losing a request: what runs there goes on elsewhere. Answers when it has begun."""
        name = exchange.scope["path_params"]["name"]
        answers = await self._ask("admin.drain", name.encode(), _ANSWER_WITHIN_S)
        if answers.answers.get(SUPERVISOR) != b"yes":
            raise NotFound(f"no worker `{name}` is up; GET /admin/workers lists them")
        await exchange.respond(202, msgspec.json.encode({"draining": name}))

    def _model(self) -> Model:
        return Model(id=self._served.name, created=self._served.created, max_model_len=self._served.max_context)
