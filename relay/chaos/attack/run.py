"""`scripts/attack`: golden answers and first tokens of a quiet server, attackers in turn, all at once, and what is left of it."""

import http.client
import json
import os
import random
import threading
import time
import urllib.request
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from relay.chaos.attack import connections, generations, hostile
from relay.chaos.attack.audit import Holding, look, settled
from relay.chaos.attack.honest import Honest, is_later, percentile_99
from relay.chaos.attack.strikes import Strikes
from relay.chaos.attack.target import Attack, Broken, Target
from relay.chaos.requests import Spec, specs
from relay.chaos.run import reference
from relay.chaos.server import ServerUnderTest

NAMES = (
    "bodies", "frames", "flood", "close-wait", "slow-writers", "slow-readers", "unread-bodies", "leavers", "logprobs", "resumables",
    "strangers", "poison", "drain", "kill",
)  # fmt: skip
DEADLY = ("poison", "drain", "kill")  # workers end of these, as they may
_QUIET, _IN_TURN = 0.25, 0.45  # of the time; the rest is for all at once
_LEAST_S = 1.0  # of each phase, even if those before it took too long
_AUDIT_S = 25.0
_HONEST = 4
_MEASURED_TOKENS = 512


class AttackRun:
    """`names`: of NAMES. deadline_s: when all must have ended, on time.monotonic's clock. `summary` can be asked for at any time."""

    def __init__(self, server: ServerUnderTest, names: Sequence[str], poison_token: int | None, seed: int, deadline_s: float) -> None:
        self._server, self._names, self._seed, self._deadline_s = server, names, seed, deadline_s
        self._poison_token = poison_token
        self._strikes = Strikes(server)
        self._rounds: Counter[str] = Counter()
        self._hung_up: Counter[str] = Counter()
        self._broke: list[str] = []
        self._first: dict[str, list[float]] = {}
        self._honest: Honest | None = None
        self._before: Holding | None = None
        self._after: Holding | None = None

    def run(self, seconds: float, *, n_tokens: int, ttft_rule: bool) -> None:
        """Everything but the server's end."""
        asked = [*specs(n_tokens), *_not_streamed(n_tokens)]
        right = reference(self._server, asked)
        target = self._measured()
        attacks = self._attacks()
        self._honest = Honest(self._server.url, asked, right, self._strikes, _HONEST)
        self._honest.start()
        ends_s = time.monotonic() + seconds
        with self._first_tokens("quiet"):
            time.sleep(seconds * _QUIET)
        self._before = self._look_at_rest()
        alone = seconds * _IN_TURN / len(self._names)
        for name in self._names:
            with self._first_tokens(name), self._nobody_dies(name):
                self._attack({name: attacks[name]}, target, min(alone, ends_s - time.monotonic()))
        if len(self._names) > 1:
            with self._first_tokens("all at once"):
                self._attack({name: attacks[name] for name in self._names}, target, ends_s - time.monotonic())
        self._honest.stop(self.left_s() - 20.0)
        self._after, held = settled(self._server, self._before, self.left_s() - 15.0)
        self._broke += [f"at the end: {what}" for what in held]
        if self._after is not None and not self._after.not_up:
            self._compare_again(asked, right)
        attacked = [ms for name, found in self._first.items() if name != "quiet" for ms in found]
        if ttft_rule and is_later(self._first["quiet"], attacked):
            self._broke.append(f"honest: first tokens come later, p99 {self._ratio(attacked):.1f} times the quiet one, outside of strikes")

    def end(self) -> None:
        """Drain the server and look at what it leaves."""
        self._broke += [f"after the end: {what}" for what in self._server.end(self.left_s() - 1.0)]

    def give_up(self, why: str) -> None:
        self._broke.append(why)

    def summary(self) -> dict[str, Any]:
        """`held`: everything did. rounds: begun. ttft_ratio: p99 against the quiet server's, by phase."""
        honest = self._honest
        broke = [*self._broke, *(honest.broke if honest is not None else ())]
        memory = {}
        if self._before is not None and self._after is not None:
            before = self._before.memory_mib
            memory = {name: round(mib - before.get(name, 0.0)) for name, mib in self._after.memory_mib.items()}
        return {
            "held": not broke,
            "rounds": dict(self._rounds),
            "hung_up": dict(self._hung_up),
            "kills": self._strikes.n_kills,
            "drains": self._strikes.n_drains,
            "honest": {name: getattr(honest, name) for name in ("answers", "refused", "forgiven", "resumed")} if honest is not None else {},
            "ttft_ms_p99_quiet": round(percentile_99(self._first.get("quiet", ())), 1),
            "ttft_ratio": {name: round(self._ratio(found), 2) for name, found in self._first.items() if name != "quiet" and found},
            "memory_mib_more": memory,
            "broke": broke[:20],
        }

    def left_s(self) -> float:
        return max(1.0, self._deadline_s - time.monotonic())

    def _ratio(self, sample: Sequence[float]) -> float:
        return percentile_99(sample) / (percentile_99(self._first.get("quiet", ())) or 1.0)

    def _attacks(self) -> dict[str, Attack]:
        strikes = self._strikes
        found: tuple[Attack, ...] = (
            hostile.bodies,
            hostile.frames,
            connections.flood,
            connections.close_wait,
            connections.slow_writers,
            connections.slow_readers,
            connections.unread_bodies,
            connections.leavers,
            generations.logprobs,
            generations.resumables,
            generations.strangers,
            strikes.around(generations.poison),
            strikes.drain,
            strikes.kill,
        )
        return dict(zip(NAMES, found, strict=True))

    def _measured(self) -> Target:
        """The model's context from the server, and how long a prompt takes it."""
        with urllib.request.urlopen(f"{self._server.url}/v1/models", timeout=30) as response:
            model = json.loads(response.read())["data"][0]
        target = Target(self._server.url, model["max_model_len"], 1.0, self._poison_token, threading.Event())
        n = min(_MEASURED_TOKENS, target.max_context // 2)
        began = time.monotonic()
        code, answer = target.post("/v1/completions", {"prompt": [4 + i % 200 for i in range(n)], "max_tokens": 1, "temperature": 0})
        if code != 200:
            raise Broken(f"a prompt of {n} tokens is answered with {code} {answer} while nothing else runs")
        return replace(target, tokens_per_s=n / (time.monotonic() - began))

    @contextmanager
    def _first_tokens(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        assert self._honest is not None
        self._first[phase] = self._honest.first_tokens_ms(began, time.monotonic())

    @contextmanager
    def _nobody_dies(self, name: str) -> Iterator[None]:
        """But of what is meant to be deadly."""
        if name in DEADLY:
            yield
            return
        before = {worker: row["epoch"] for worker, row in self._workers().items()}
        yield
        for worker, row in self._workers().items():
            if row["epoch"] != before.get(worker):
                self._broke.append(f"{name}: {worker} died of it: {row['last_death']}")

    def _workers(self) -> dict[str, dict[str, Any]]:
        while True:
            try:
                return self._server.workers()
            except OSError:
                if time.monotonic() > self._deadline_s:
                    raise
                time.sleep(0.05)

    def _look_at_rest(self) -> Holding:
        """The honest go on, so connections are those that they have at most, and blocks are not looked at."""
        held = look(self._server)
        return replace(held, connections=max(1, min(held.connections, _HONEST)))

    def _attack(self, attacks: dict[str, Attack], target: Target, seconds: float) -> None:
        over = threading.Event()
        aimed = replace(target, over=over, open=weakref.WeakSet())
        threads = [threading.Thread(target=self._attacker, args=(*each, aimed), name=each[0], daemon=True) for each in attacks.items()]
        for thread in threads:
            thread.start()
        time.sleep(max(_LEAST_S, seconds))
        over.set()
        aimed.hang_up()
        for thread in threads:
            thread.join(max(1.0, self.left_s() - _AUDIT_S))
            if thread.is_alive():
                self._broke.append(f"{thread.name}: a round does not end")

    def _attacker(self, name: str, attack: Attack, target: Target) -> None:
        draw = random.Random(f"{self._seed} {name} {sum(self._rounds.values())}")
        while True:
            self._rounds[name] += 1
            try:
                attack(target, draw)
            except Broken as broken:
                self._broke.append(f"{name}: {broken}")
                return
            except (OSError, http.client.HTTPException):
                self._hung_up[name] += 1
            if target.over.wait(0.05):
                return

    def _compare_again(self, asked: Sequence[Spec], right: Sequence[Any]) -> None:
        try:
            again = reference(self._server, asked)
        except AssertionError as error:
            self._broke.append(f"at the end: {error}")
            return
        for now, then in zip(again, right, strict=True):
            if now.answer != then.answer:
                self._broke.append(f"at the end: `{now.kind}` has another answer, {now.answer!r:.300} instead of {then.answer!r:.300}")


def watch(run: AttackRun, print_summary: Any) -> threading.Timer:
    """Ends this process at the deadline, whatever hangs: the server goes with it."""

    def end() -> None:
        run.give_up("it did not end in time")
        print_summary()
        os._exit(1)

    timer = threading.Timer(run.left_s(), end)
    timer.daemon = True
    timer.start()
    return timer


def _not_streamed(n_tokens: int) -> list[Spec]:
    chat = {"messages": [{"role": "user", "content": "Where does rain come from?"}], "max_tokens": n_tokens, "temperature": 0}
    whole = {"prompt": "A list of colours:", "n": 2, "logprobs": 2, "seed": 9, "temperature": 0.8, "max_tokens": n_tokens, "stop": ["\n\n"]}
    return [
        Spec(kind="chat, not streamed", path="/v1/chat/completions", body=chat),
        Spec(kind="n = 2, logprobs, stop, not streamed", path="/v1/completions", body=whole),
    ]
