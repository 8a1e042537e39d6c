"""The bugs that can be planted: name to (module, text that occurs once in it, what stands there instead)."""

Edit = tuple[str, str, str]

_DECODE, _PREFILL, _GATEWAY, _ROUTER = (f"relay.actors.{name}" for name in ("decode", "prefill", "gateway", "router"))
_OUTBOX, _BOOK = "relay.runtime.token_outbox", "relay.kv.book"
_NODE, _LOG, _AHEAD = "relay.runtime.node", "relay.engine.token_log", "relay.engine.ahead"
_ENGINE, _LINE, _ROWS, _SPECULATION, _STEP = (f"relay.engine.{name}" for name in ("engine", "line", "rows", "speculation", "step"))
_ARRIVALS = "relay.engine.arrivals"
_LIFE, _MACHINE, _FAULTS = "relay.simulation.life", "relay.simulation.machine", "relay.simulation.faults"
_LIMITS = "relay.auth.limits"
_THREAD, _SUPERVISOR, _INCARNATION, _RESTART = (f"relay.runtime.{name}" for name in ("compute", "supervisor", "incarnation", "restart"))

MUTANTS: dict[str, tuple[Edit, ...]] = {
    # --- cancels
    "decode loses a Cancel": ((_DECODE, "            self._cancel(entry)  # its log", "            pass  # its log"),),
    "decode forgets the tombstone": ((_DECODE, "            self._tombstones.add(key)\n", "            pass\n"),),
    "decode does not revoke a lease": (
        (
            _DECODE,
            'if entry.state == "leased":\n            assert entry.prefill is not None',
            "if False:\n            assert entry.prefill is not None",
        ),
    ),
    "decode goes on for a dead gateway": (
        (_DECODE, "            elif entry.gateway == address:\n                self._cancel(entry)\n", ""),
    ),
    "prefill goes on after Revoke": (
        (
            _PREFILL,
            "        elif not job.revoked:\n            job.revoked = True\n            self._host.submit(Drop(job.sequence.id))",
            "        elif not job.revoked:\n            job.revoked = True",
        ),
    ),
    "prefill goes on for a dead decode worker": (
        (
            _PREFILL,
            "            if key[0] == address and not job.revoked:\n                job.revoked = True\n"
            "                self._host.submit(Drop(job.sequence.id))",
            "            if key[0] == address and not job.revoked:\n                job.revoked = True",
        ),
    ),
    "router loses a Cancel": ((_ROUTER, "            self._context.post(place.decode, message)\n", "            pass\n"),),
    "router places after a Cancel what it declined": (
        (_ROUTER, "place.admit is None or key in self._tombstones:", "place.admit is None:"),
    ),
    "gateway does not cancel what it closes": (
        (
            _GATEWAY,
            "        if self._remove(flight) and not flight.ended:\n            self._cancel(flight, reason, answered=answered)",
            "        self._remove(flight)",
        ),
    ),
    "gateway does not refuse stale mail": (
        (
            _GATEWAY,
            '        self._on_event("stale")\n        self._context.post(\n            sender,',
            '        self._on_event("stale")\n        return\n        self._context.post(\n            sender,',
        ),
    ),
    # --- leases and blocks
    "a block is freed while it is leased": (
        (
            _DECODE,
            '            entry.state = "revoking"\n            self._book.quarantine(entry.leased)\n',
            "            return self._drop(entry)\n",
        ),
    ),
    "a revoked lease is kept when its writer dies": (
        (
            _DECODE,
            'if entry.prefill == address and entry.state in ("leased", "revoking"):',
            'if entry.prefill == address and entry.state == "leased":',
        ),
    ),
    "a lease is returned before the engine lets go": (
        (
            _PREFILL,
            "            job.revoked = True\n            self._host.submit(Drop(job.sequence.id))\n\n    def _on_down",
            "            job.revoked = True\n            self._host.submit(Drop(job.sequence.id))\n"
            "            self._context.post(message.decode, Returned(request_id=message.request_id, attempt=message.attempt))\n"
            "\n    def _on_down",
        ),
    ),
    "a lease is taken for filled before the last layer": (
        (_MACHINE, "for layer in range(machine.layout.n_layers):", "for layer in range(machine.layout.n_layers - 1):"),
    ),
    "the last block of a prompt is not pushed": ((_ROWS, "    done = n_computed == len(sequence.tokens)\n", "    done = False\n"),),
    "checksums are not verified": ((_ARRIVALS, "        if begin == end:\n", "        if True:\n"),),
    "of a part of what joins only the last block is verified": (
        (_ARRIVALS, "begin, arrival.n_done = arrival.n_done, end", "begin, arrival.n_done = max(arrival.n_done, end - 1), end"),
    ),
    "what is dropped while it is verified joins": ((_ENGINE, " or self._arrivals.remove(id)\n", "\n"),),
    "a pool is known by its actor, not by its epoch": (
        (
            "relay.kv.pools",
            "        if address not in self._open:\n",
            "        address = next((each for each in self._open if each.actor == address.actor), address)\n"
            "        if address not in self._open:\n",
        ),
        ("relay.kv.pools", "        if self._open.get(address) is not self._own:\n", "        if False:\n"),
    ),
    "a shared block is freed by its first reader": (
        (_BOOK, "                    if self._readers[block] > 0:\n", "                    if False:\n"),
    ),
    "a block is shared before it is full": (
        (
            _LINE,
            "        while (sequence.n_published + 1) * size <= sequence.n_computed:",
            "        while (sequence.n_published + 1) * size <= sequence.n_computed + 1:",
        ),
    ),
    "an adopted block counts as free": (
        (
            _BOOK,
            "                self._state[block], self._readers[block] = BlockState.RUNNING, 1\n",
            "                self._state[block], self._readers[block] = BlockState.RUNNING, 1\n                self._free.append(block)\n",
        ),
    ),
    "tokens are not compared on a hit, and keys collide": (
        ("relay.kv.prefix", "digest_size=16, key=previous).digest()", "digest_size=16).digest()"),
        (_BOOK, "                if held != tuple(tokens[i * len(held) : (i + 1) * len(held)]):\n                    break\n", ""),
    ),
    "what a preempted sequence needs is leased away": ((_BOOK, "if n + self._reserved <= len(self._free)", "if n <= len(self._free)"),),
    # --- tokens
    "the first token goes to the gateway only": (
        (
            _DECODE,
            "        if first is None:\n            sequence, starts",
            "        if first is not None or first is None:\n            sequence, starts",
        ),
    ),
    "the first token goes to decode only": ((_PREFILL, "        for part in parts(row):\n", "        for part in parts(row)[1:]:\n"),),
    "the first token is sent with every row": ((_DECODE, "        entry.first = None\n        return Row(", "        return Row("),),
    "an attempt begins without the last token": (
        (_GATEWAY, "            tokens=(*flight.prompt, *flight.ids),\n", "            tokens=(*flight.prompt, *flight.ids[:-1]),\n"),
    ),
    "two tasks send to one gateway": (
        (
            _OUTBOX,
            "                while self._full:\n                    nursery.start_soon(self._send_when_free, self._full.pop())\n",
            "                for gateway in list(self._unsent):\n                    nursery.start_soon(self._send_when_free, gateway)\n",
        ),
    ),
    "rows without credit are dropped": (
        (
            _OUTBOX,
            "[given for group in groups for given in group]\n                    self._full",
            "some[:0]\n                    self._full",
        ),
    ),
    "a preempted sequence resumes with stale n_computed": (
        (
            _ENGINE,
            "        sequence.blocks, sequence.n_computed, sequence.n_published, sequence.preempted = [], 0, 0, True\n",
            "        sequence.blocks, sequence.n_published, sequence.preempted = [], 0, True\n",
        ),
        (
            _LINE,
            "        sequence.n_computed = len(shared) * self._block_tokens\n        sequence.n_published",
            "        sequence.n_computed = max(sequence.n_computed, len(shared) * self._block_tokens)\n        sequence.n_published",
        ),
    ),
    "random numbers are keyed by the attempt's own position": (
        (
            "relay.engine.ahead",
            "uniform(sampling.seed, sampling.choice, len(sequence.tokens) + n_more)",
            "uniform(sampling.seed, sampling.choice, sequence.n_computed % 7)",
        ),
    ),
    # --- attempts
    "an attempt number is used again": (
        (_GATEWAY, "flight.attempt + 1 if not flight.resumed else now_ns(), None", "flight.attempt, None"),
    ),
    "the attempt of mail is not compared": (
        (_GATEWAY, "return flight if flight is not None and flight.attempt == attempt else None", "return flight"),
    ),
    "a second place of one attempt is accepted": (
        (_GATEWAY, "if flight is None or flight.decode not in (None, message.decode):", "if flight is None:"),
    ),
    "what is not placed is not admitted again after a router's death": (
        (_GATEWAY, "                if flight.decode is None:\n                    self._admit(flight)\n", "                pass\n"),
    ),
    "a gateway does not say where it was drained": (
        (_DECODE, "(self._context.address,), drained=True)\n            self._cancel", "drained=True)\n            self._cancel"),
        (_DECODE, "reason=_DRAINED, dead=(self._context.address,), drained=True", "reason=_DRAINED, drained=True"),
    ),
    "a drain waits for no reader": ((_DECODE, "trio.current_time() < until_s and self._logs.unread()", "False"),),
    "a drain counts as a failure": ((_GATEWAY, "        flight.failures += not drained\n", "        flight.failures += 1\n"),),
    "a displaced attempt is not tried again": (
        (
            _GATEWAY,
            "            self._retry(flight, message.reason",
            "            0 and self._retry(flight, message.reason",
        ),
    ),
    "a gateway does not watch its decode worker": (
        (
            _GATEWAY,
            "            flight.door.ring()\n        self._context.monitor(message.decode)\n",
            "            flight.door.ring()\n",
        ),
    ),
    "nobody tells a gateway of the death of its decode worker": (
        (
            _GATEWAY,
            "            flight.door.ring()\n        self._context.monitor(message.decode)\n",
            "            flight.door.ring()\n",
        ),
        (_GATEWAY, "            self._context.monitor(address)  # it may hold", "            pass  # it may hold"),
        (
            _ROUTER,
            "                self._context.post(\n                    place.gateway,\n                    Displaced(\n",
            "                0 and self._context.post(\n                    place.gateway,\n                    Displaced(\n",
        ),
    ),
    "the router is not told who is dead": ((_GATEWAY, "            dead=flight.dead,\n", "            dead=(),\n"),),
    "an older attempt is not given up for a newer": ((_DECODE, "            self._cancel(other)\n", "            pass\n"),),
    # --- places
    "Left is not sent": (
        (_DECODE, "        self._leave(entry.router, entry.key, n_generated, finished=finished or entry.answered)\n", ""),
    ),
    "prefill does not say Left": ((_PREFILL, "        self._leave(job.message)\n", ""),),
    "a declined request is dropped": ((_ROUTER, "        self._queue.add(Queued(place.admit, now_ns(), declined=True))\n", ""),),
    "a waiter is forgotten": (
        (
            _ROUTER,
            "            self._lengths.saw(message.n_generated)\n        self._place_queued()\n",
            "            self._lengths.saw(message.n_generated)\n",
        ),
    ),
    "an Expect on its way to a dead worker is nobody's": (
        (
            _ROUTER,
            "                self._context.post(\n                    place.gateway,\n                    Displaced(\n",
            "                0 and self._context.post(\n                    place.gateway,\n                    Displaced(\n",
        ),
    ),
    "places of a dead worker are kept": (
        (
            _ROUTER,
            "            if place.decode == address:\n                self._forget(key)\n",
            "            if place.decode == address:\n",
        ),
    ),
    "a new router does not ask who holds what": (
        (_DECODE, "                holdings=tuple(holdings),\n", "                holdings=(),\n"),
    ),
    "started requests are refused as overload": (
        (
            _ROUTER,
            "if n_waiting >= self._config.max_queue and not message.again and",
            "if n_waiting >= self._config.max_queue and",
        ),
    ),
    "the cache index hears of coming and going in any order": (
        (_BOOK, "        self._changes[key] = False\n", "        self._changes.setdefault(key, False)\n"),
    ),
    "news of a cache that died with its worker is believed": (
        (_ROUTER, "                if cache is not None and epoch == message.epoch:", "                if cache is not None:"),
    ),
    "two pools wait for each other's leases": (
        ("relay.policy.placement", "return prefill.worker == decode.worker or rank(prefill) > rank(decode)", "return True"),
    ),
    "a dead router's Expect is taken for its successor's": ((_DECODE, "message.router.epoch < self._router.epoch:", "False:"),),
    # --- the engine's line
    "an engine that waits for memory is not nudged": ((_DECODE, "        self._host.nudge()\n", ""),),
    "who lacks memory holds up those who have theirs": (
        (
            _LINE,
            "                sequence.lacked_blocks = full = True\n                continue\n",
            "                sequence.lacked_blocks = full = True\n                break\n",
        ),
    ),
    "two sequences wait for each other's blocks": (
        (_LINE, "return owner is not None and _rank(owner) < _rank(sequence)", "return owner is not None and owner is not sequence"),
        (_LINE, "        if not self._book.caching:\n            return\n", ""),
    ),
    "announced blocks are not withdrawn": ((_LINE, "            self._withdraw(sequence)\n", "            pass\n"),),
    # --- resumable streams
    "who lost a stream to another gateway is not told": (
        (_DECODE, '            elif other.state in ("leased", "running"):\n', "            elif False:\n"),
    ),
    "a superseded connection ends its successor's flight": (
        (
            _GATEWAY,
            "        if self._flights.get(flight.request_id) is not flight:\n",
            "        if flight.request_id not in self._flights:\n",
        ),
    ),
    "an old reader's Cancel ends a resumed stream": (
        (_DECODE, "        elif entry.log is None or message.gateway in (None, entry.gateway):", "        else:"),
    ),
    "logs of displaced attempts are kept for ever": (
        (_LOG, "        self.over = True\n        self._rests()\n", "        self.over = True\n"),
    ),
    "a resumed stream begins at its next token": (
        (_DECODE, "            self._outbox.send({message.gateway: [(log.row(key), ())]})\n", "            pass\n"),
    ),
    # --- the runtime
    "an address not heard of yet is taken for dead": ((_LIFE, "hold_early=True", "hold_early=False"),),
    "an end of file is taken for a death": (
        (
            _FAULTS,
            '        self._world.trace.note(f"between {life} and {other} for {length_s:.4f} s")\n',
            "        self._world.trace.note('end of file')\n        if link.is_empty():\n"
            "            life.node.down(*other.key, 'end of file')\n",
        ),
    ),
    "monitoring the dead says nothing": (
        (_NODE, "            self._tell_down(watcher, target, *self._last_words(target))\n", "            pass\n"),
    ),
    "a dead worker's watchers are forgotten": (
        (
            _NODE,
            "        for watcher in self._watchers.pop(address, {}):\n"
            "            self._tell_down(watcher, address, reason, suspects, lone)\n",
            "        self._watchers.pop(address, {})\n",
        ),
    ),
    "credits of another worker's mail are not given back": (
        (_NODE, "            if 2 * self._owed[origin, address] >= self._window:", "            if False:"),
    ),
    "the router's word of a death comes without the suspects": (
        (_ROUTER, "                suspect = key[0] in message.suspects\n", "                suspect = False\n"),
    ),
    "a step is abandoned that somebody wants yet": ((_STEP, "        if not self._wanted:\n", "        if True:\n"),),
    "what an abandoned step has not computed is published": (
        (
            _ENGINE,
            "        step.report.n_prefill_tokens = 0\n",
            "        step.report.n_prefill_tokens = 0\n"
            "        for part in step.parts:\n            part.sequence.n_computed += part.n_rows\n"
            "            self._line.publish(part.sequence)\n",
        ),
    ),
    "a wrong guess is believed": ((_ENGINE, "goes_on and sequence.tokens[-1] == scored.guess and token >= 0", "goes_on and token >= 0"),),
    "KV of wrong guesses counts as computed": (
        (
            _ENGINE,
            "sequence.n_computed = len(sequence.tokens) - 1 if part.drafts else sequence.n_computed + part.n_rows",
            "sequence.n_computed += part.n_rows",
        ),
    ),
    "guesses share one random number": ((_ROWS, "draws.append(next_draw(sequence, n))", "draws.append(next_draw(sequence))"),),
    "guesses are computed beyond the blocks": ((_SPECULATION, "return tuple(drafts[:room])", "return tuple(drafts)"),),
    "a sequence goes on behind its last token": ((_ENGINE, " and token >= 0 and finish is None\n", " and token >= 0\n"),),
    "who died in a step is not suspected": (
        (_NODE, "            self._forget(address, reason, suspects, lone)\n", "            self._forget(address, reason)\n"),
    ),
    # --- the step in flight, the compute thread
    "a step is begun though a job has come": ((_ENGINE, " or self._line or self.arrived():", " or self._line:"),),
    "jobs that come to a step in flight are lost": (
        (_ENGINE, "(step, pending), self._held = self._flight, jobs", "(step, pending), self._held = self._flight, []"),
    ),
    "a step follows one in which somebody has finished": (
        (_ENGINE, "if any(gain[1] is not None for gain in step.gains if gain is not None) or", "if"),
    ),
    "a step follows with the tokens of the one before": ((_ENGINE, "            batch.tokens[:] = result.ids\n", "            pass\n"),),
    "a step follows beyond the blocks": (
        (_ENGINE, " or each.lone or len(each.tokens) > len(each.blocks) * self._block_tokens for", " or each.lone for"),
    ),
    "nobody is suspected of a step that followed": (
        (_ENGINE, "if self._board is not None and not step.followed_ns:", "if self._board is not None:"),
    ),
    "blocks given early are not those of the table": (
        (_AHEAD, "sequence.blocks is not self._blocks[row] or len(sequence.blocks) != self._n_blocks[row]", "False"),
    ),
    "what an engine told before it fell idle wakes nobody": (
        (_THREAD, "            if not (busy and self._tells):\n", "            if not self._tells:\n"),
    ),
    "jobs looked at early are not given to a step": (
        (_THREAD, "            jobs = self.arrived()\n", "            self._arrived = []\n            jobs = self.arrived()\n"),
    ),
    "what is taken at once overtakes what lies in the mailbox": (
        ("relay.runtime.mailbox", "now is not None and not self._messages and isinstance", "now is not None and isinstance"),
    ),
    "what is taken at once gives no credit back": (
        ("relay.runtime.mailbox", "                self._taken(origin, message)\n                now.take", "                now.take"),
    ),
    # --- ledgers
    "a token's journey is charged though the next step was computed beside it": (
        (
            "relay.ledger.ledger",
            "        self._take_back()\n        cursor, slots = self.cursor_ns, self._slots\n",
            "        self._settle()\n        cursor, slots = self.cursor_ns, self._slots\n",
        ),
    ),
    "a step's time goes to the hop of its token": ((_GATEWAY, "            ledger.fold(message.trail)\n", ""),),
    "a step's time ends where its floor does": (
        (
            "relay.engine.trails",
            "        (Span.DECODE_EXCESS, alone),\n"
            "        (Span.DECODE_INTERFERENCE, step.computed_ns),\n"
            "        (Span.DECODE_HOST, ended),\n",
            "",
        ),
    ),
    # --- the supervisor
    "a death is told before the dead is reaped": (
        (_INCARNATION, "            ended = await child.fence()\n", "            child.kill()\n            ended = 'SIGKILL'\n"),
    ),
    "a step that hangs is nobody's": ((_INCARNATION, "        elif self._late_step != beat.steps:\n", "        elif True:\n"),),
    "nobody is suspected of a step that hangs": (
        (
            _INCARNATION,
            '(runtime.hang_s is {self._settings.hang_s:g})",\n                blame="step",\n',
            '(runtime.hang_s is {self._settings.hang_s:g})",\n',
        ),
    ),
    "who is silent is left alone": (
        (_INCARNATION, '            elif self.state != "draining" and now', "            elif self.pid == 0 and now"),
    ),
    "restarts do not wait longer and longer": (
        (
            _RESTART,
            "        return float(min(self._first_s * 2.0 ** min(n - 1, 60), self._most_s))\n",
            "        return float(self._first_s)\n",
        ),
    ),
    "a worker rests though nobody serves in its place": (
        (
            _SUPERVISOR,
            "            if not roles or not all(any(other.serves(role) for other in others) for role in roles):\n",
            "            if False:\n",
        ),
    ),
    "the server gives up at the first death": ((_RESTART, "        if n <= self._max:\n", "        if False:\n"),),
    "all ranks drain at once": (
        (
            _SUPERVISOR,
            "            members = [member for member in self._members.values() if member.spec.drain_rank == rank]\n",
            "            members = list(self._members.values())\n",
        ),
    ),
    "a worker that has drained does not start again": (
        (
            _SUPERVISOR,
            "            if member.drain.is_set():\n                break\n",
            "            if member.drain.is_set() or death.announced:\n                break\n",
        ),
    ),
    "what fits in no frame is told to nobody": (
        (
            _NODE,
            "        for request_id, attempt in _attempts(message) if sender in self._boxes else ():\n",
            "        for request_id, attempt in ():\n",
        ),
    ),
    "the room of what fits in no frame stays taken": (
        (
            _ROUTER,
            "        place = self._forget((message.request_id, message.attempt))\n        if place is not None and place.admit",
            "        place = self._places.get((message.request_id, message.attempt))\n        if place is not None and place.admit",
        ),
    ),
    "what a left stream came to is not told": (
        (
            _DECODE,
            "        if entry.left_by is not None:\n            self._spent(entry.left_by, entry.key",
            "        if False:\n            self._spent(entry.left_by, entry.key",
        ),
    ),
    # --- what keys may
    "a key may run one more than its limit": ((_LIMITS, "self.running >= limits.concurrency", "self.running > limits.concurrency"),),
    "what a dead gateway had reserved is kept": (("relay.actors.limiter", "released = self._accounts.release(address)", "released = 0"),),
    "a quota does not ask a new limiter again": (
        ("relay.actors.quota", "            self._context.post(address, some[0].reserve)\n", "            pass\n"),
    ),
    "a stream that its client has left holds its key's place for ever": (
        ("relay.http.limits", "            if n_open == 0:\n", "            if n_open < 0:\n"),
    ),
    # --- pools too small
    "what only an absent worker has room for is refused": (
        (
            _ROUTER,
            "            room = self._room.get(role, 0)\n",
            "            room = max(w.n_tokens for w in (self._decode if role == 'decode' else self._prefill).values())\n",
        ),
    ),
    "who waits for an absent worker's room is forgotten": (
        (_ROUTER, "        self._queue.bring_back()  # it may", "        pass  # it may"),
    ),
    "a request is placed where it has no room": (
        (
            "relay.policy.placement",
            "    return [worker for worker in workers if n_tokens <= worker.n_tokens]\n",
            "    return list(workers)\n",
        ),
    ),
    # --- spares
    "a spare that cannot be started ends the server": (
        ("relay.runtime.spares", "        except OSError as error:  # no process", "        except KeyError as error:  # no process"),
    ),
}
