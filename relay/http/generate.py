"""`POST /v1/chat/completions` and `POST /v1/completions`: a body in, an answer or a stream of it out; one code for all four paths.

A request becomes one flight per choice of each prompt, and the choices are pumped as their tokens come. Until the first byte has gone every
failure is an HTTP status; after it, an error event. A client that leaves ends its flights at once, streaming or not.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import trio

from relay.actors.gateway import Bell, Flight, GatewayActor
from relay.clock import now_ns
from relay.config import GatewayConfig
from relay.errors import ClientGone, ContextTooLong, InvalidRequest, ModelNotFound, RequestError, StreamLost
from relay.http.choice import Choice, Seen, echoed
from relay.http.envelope import Envelope, envelope_of, refuse_long_scores, unsealed
from relay.http.exchange import Exchange
from relay.http.feed import Start, feed
from relay.http.holdings import Holdings
from relay.http.limits import Meter, most_tokens
from relay.http.positions import Positions, check_position, refuse_many
from relay.http.turns import Pace, Turns
from relay.http.used import Used
from relay.ledger.spans import Span
from relay.messages import Address, Resumable, Stopping
from relay.openai.chat import ChatRequest, parse_chat
from relay.openai.completion import CompletionRequest, parse_completion
from relay.openai.logprob import ChatScores, CompletionScores, Scores
from relay.openai.options import Options
from relay.openai.response import Answer, Head, chat_response, completion_response
from relay.openai.stream import DONE, KEEP_ALIVE, ChatStream, CompletionStream, EventStream, error_event
from relay.openai.usage import Usage
from relay.runtime.frames import MAX_FRAME
from relay.text.chat_template import ChatTemplate
from relay.text.stop import StopStrings
from relay.text.tokenizer import Tokenizer

Request = TypeVar("Request", ChatRequest, CompletionRequest)

_INLINE_BYTES = 4 << 10  # a larger body is parsed and tokenized on a thread, so that other streams go on
_INLINE_NS, _SLOW_IN_A_ROW = 5_000_000, 3  # and so is every one from then on: the template is slow
_LARGE_BYTES = 128 << 10  # these wait for one another, and nobody else waits for them
_THREADS, _THREADS_FOR_LARGE = trio.CapacityLimiter(2), trio.CapacityLimiter(1)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What is served. `max_context` is tokens of prompt and answer together: the model's, or what the largest pool holds if less."""

    name: str
    max_context: int
    created: int


class Prompt(msgspec.Struct, frozen=True):
    """`text` is what an echo shows; not the first `n_added` ids, which the tokenizer put in front of the client's text."""

    ids: tuple[int, ...]
    text: str
    n_added: int = 0


class Held(msgspec.Struct, frozen=True):
    """Who remembers one choice of a resumable stream."""

    decode: Address
    attempt: int


class Endpoint(ABC, Generic[Request]):
    """One of the two; the HTTP application calls `answer` with each request's exchange."""

    def __init__(
        self,
        gateway: GatewayActor,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        served: Served,
        config: GatewayConfig,
        meter: Meter,
        turns: Turns,
        holdings: Holdings,
        *,
        share_prefix_cache: bool = False,
    ) -> None:
        self._turns = turns
        self._n_slow = 0
        self._gateway, self._tokenizer, self._template = gateway, tokenizer, template
        self._served, self._config, self._meter = served, config, meter
        self._holdings, self._share_prefix_cache = holdings, share_prefix_cache

    async def answer(self, exchange: Exchange) -> None:
        """Raises RequestError while nothing has been sent."""
        exchange.timeout_s()  # from here on its time is limited
        with exchange.in_time():
            body = await exchange.read_body(int(self._config.max_body_mib * (1 << 20)), self._config.body_timeout_s)
            request, prompts = await self._understand(body)
        del body
        exchange.release_body()
        exchange.ledger.close(Span.GATEWAY_TOKENIZE, now_ns())
        exchange.caller.check_model(self._served.name)
        exchange.caller.check_priority(request.options.priority, self._config.best_priority)
        options = request.options
        seed = options.seed if options.seed is not None else secrets.randbits(63)
        resumable, secret = None, exchange.resume_secret()
        if options.stream and secret is not None:
            envelope = envelope_of(exchange, request, seed, secret)
            resumable = envelope.resumable(self._config.max_resumable_kib << 10)
            exchange.headers["x-relay-resume"] = exchange.answer_id
        bell = Bell()
        choices = await self._choices(exchange, request, prompts, bell, seed, resumable)
        pace = self._turns.pace()

        async def submit(flight: Flight, later: bool) -> None:
            self._gateway.submit(flight, later=later)
            await pace.breathe()

        with self._holdings.hold(exchange.caller.name, [choice.flight for choice in choices], whole=not options.stream):
            await self._run(exchange, request, prompts, choices, bell, submit)

    async def resume(self, exchange: Exchange, envelope: Envelope, held: Mapping[str, Held], seen: Mapping[int, Seen]) -> None:
        """Go on with a stream that another gateway began, or this one before its client left. Raises RequestError."""
        request, prompts = await self._understand_again(envelope.request)
        exchange.continues(envelope.request_id, envelope.public_id, envelope.created, envelope.deadline_ns)
        exchange.ledger.close(Span.GATEWAY_TOKENIZE, now_ns())
        bell = Bell()
        resumable = envelope.resumable(len(envelope.request) + MAX_FRAME)  # what was taken once is taken again
        exchange.headers["x-relay-resume"] = exchange.answer_id
        choices = await self._choices(exchange, request, prompts, bell, envelope.seed, resumable)
        check_position(seen, choices)
        for choice in choices:
            if choice.flight.request_id not in held:
                raise StreamLost(f"choice {choice.index} of `{envelope.public_id}` is not there any more; ask anew")
            choice.flight.attempt = held[choice.flight.request_id].attempt
            choice.replay = seen.get(choice.index, Seen(0, False))

        async def take_over(flight: Flight, later: bool) -> None:
            """Without a pause between choices: who resumes the stream after us takes all of them."""
            self._gateway.take_over(flight, held[flight.request_id].decode)

        with self._holdings.hold(exchange.caller.name, [choice.flight for choice in choices], whole=False):
            await self._run(exchange, request, prompts, choices, bell, take_over)

    async def _run(
        self,
        exchange: Exchange,
        request: Request,
        prompts: Sequence[Prompt],
        choices: list[Choice],
        bell: Bell,
        start: Start,
    ) -> None:
        """Start the flights and answer, until the end, the client's leaving or the deadline, whichever is first."""
        n_most = sum(choice.flight.stopping.max_tokens for choice in choices)
        with exchange.in_time():
            await self._meter.start(exchange, exchange.n_prompt, exchange.n_prompt + n_most)
        exchange.ledger.close(Span.GATEWAY_AUTH, now_ns())
        error: RequestError | None = None
        gone = False
        try:
            with trio.move_on_after(exchange.time_left_s()) as limit:
                async with trio.open_nursery() as nursery:

                    async def watch() -> None:
                        nonlocal gone
                        await exchange.until_disconnect()
                        if not exchange.ending:  # the end of an answer reads as a disconnect too
                            gone = True
                            nursery.cancel_scope.cancel()

                    nursery.start_soon(watch)
                    nursery.start_soon(feed, [choice.flight for choice in choices], start)
                    try:
                        if request.options.stream:
                            await self._stream(exchange, request, prompts, choices, bell)
                        else:
                            await self._whole(exchange, request, prompts, choices, bell)
                    except RequestError as caught:
                        error = caught
                    nursery.cancel_scope.cancel()
        finally:
            if gone or isinstance(error, StreamLost):  # another connection may have taken over, or be about to
                self._leave(exchange, choices, refused=error is not None)
            else:
                for choice in choices:
                    self._gateway.close(choice.flight, "it is answered")
                self._settle(exchange, choices, refused=error is not None)
        if gone:
            exchange.ledger.close(Span.CANCELLED, now_ns())
            exchange.error = ClientGone("the client left before the end")
        elif limit.cancelled_caught and not exchange.complete:
            exchange.ledger.close(Span.CANCELLED, now_ns())
            error = exchange.too_late()
        if error is not None:
            raise error

    def _leave(self, exchange: Exchange, choices: list[Choice], *, refused: bool) -> None:
        """What goes on without its client is charged for when it has ended."""
        self._tell(exchange, choices)
        going_on = {choice.index for choice in choices if self._gateway.goes_on(choice.flight)}
        ended = sum(choice.n_tokens for choice in choices if choice.index not in going_on)
        on_spent = self._meter.end_later(exchange, exchange.n_prompt + ended, len(going_on))
        for choice in choices:
            self._gateway.leave(choice.flight, "the client left", on_spent)
        if not going_on:
            self._settle(exchange, choices, refused=refused)

    async def _understand(self, body: bytes) -> tuple[Request, list[Prompt]]:
        return await self._aside(len(body), lambda: self._read(body))

    async def _aside(self, n_bytes: int, read: Callable[[], tuple[Request, list[Prompt]]]) -> tuple[Request, list[Prompt]]:
        """What takes long on a thread, so that other streams go on."""
        if n_bytes > _INLINE_BYTES or self._n_slow == _SLOW_IN_A_ROW:
            threads = _THREADS if n_bytes <= _LARGE_BYTES else _THREADS_FOR_LARGE
            return await trio.to_thread.run_sync(read, limiter=threads, abandon_on_cancel=True)
        start_ns = time.thread_time_ns()
        try:
            return read()
        finally:
            self._n_slow = self._n_slow + 1 if time.thread_time_ns() - start_ns > _INLINE_NS else 0

    async def _understand_again(self, request: bytes) -> tuple[Request, list[Prompt]]:
        """What was understood before, and kept."""

        def read() -> tuple[Request, list[Prompt]]:
            known = msgspec.json.decode(request, type=self._kind)
            return known, self._prompts(known)

        return await self._aside(len(request), read)

    def _read(self, body: bytes) -> tuple[Request, list[Prompt]]:
        """Everything that can be refused before anything starts."""
        request = self._parse(body)
        if request.options.model is not None and request.options.model != self._served.name:
            raise ModelNotFound(f"the model `{request.options.model}` is not served here; `{self._served.name}` is", param="model")
        request.check(self._tokenizer.vocab_size)
        return request, self._prompts(request)

    async def _choices(
        self, exchange: Exchange, request: Request, prompts: Sequence[Prompt], bell: Bell, seed: int, resumable: Resumable | None
    ) -> list[Choice]:
        options = request.options
        alone = len(prompts) * options.best_of == 1
        exchange.n_prompt = sum(len(prompt.ids) for prompt in prompts)
        choices: list[Choice] = []
        if resumable is not None:
            refuse_many(len(prompts) * options.best_of)
        stops = StopStrings(options.stop)
        pace = self._turns.pace()
        most = most_tokens(exchange.caller.limits, exchange.n_prompt, len(prompts) * options.best_of)
        for prompt in prompts:
            stopping = self._stopping(options, len(prompt.ids), most)
            if resumable is not None:
                refuse_long_scores(stopping.max_tokens, options.sampling.logprobs)
            for draw in range(options.best_of):
                index = len(choices)
                flight = Flight(
                    request_id=exchange.answer_id if alone else f"{exchange.answer_id}/{index}",
                    prompt=prompt.ids,
                    sampling=msgspec.structs.replace(options.sampling, seed=seed, choice=draw),
                    stopping=stopping,
                    ledger=exchange.ledger,
                    bell=bell,
                    salt=exchange.caller.namespace(options.salt, shared=self._share_prefix_cache),
                    priority=options.priority,
                    deadline_ns=exchange.deadline_ns,
                    prompt_logprobs=self._prompt_logprobs(request),
                    resumable=resumable if resumable is None or index == 0 else unsealed(resumable),
                )
                choices.append(
                    Choice(
                        index,
                        flight,
                        self._tokenizer,
                        stops=stops,
                        include_stop=options.include_stop,
                        skip_special=options.skip_special_tokens,
                        with_logprobs=options.logprobs is not None,
                    )
                )
                await pace.breathe()
        return choices

    def _refuse_endless(self, n_chars: int) -> None:
        """Raises ContextTooLong for a text that cannot fit if each of its tokens were the longest, before time goes into encoding it."""
        least = n_chars // self._tokenizer.longest_token
        if least > self._served.max_context:
            raise self._too_long(f"more than {least}")

    def _too_long(self, n_tokens: str) -> ContextTooLong:
        """In words by which clients tell this error from others: of `prompt is too long` and `maximum context length is`."""
        text = (
            f"the prompt is too long: it has {n_tokens} tokens, and this model's maximum context length is {self._served.max_context} "
            "tokens, prompt and answer together"
        )
        return ContextTooLong(text, param=self.prompt_param)

    def _stopping(self, options: Options, n_prompt: int, most: int | None) -> Stopping:
        """`most`: of a choice whose client names no number."""
        room = self._served.max_context - n_prompt
        if room < 1:
            raise self._too_long(str(n_prompt))
        max_tokens = options.max_tokens
        if max_tokens is None:
            default = self._config.default_max_tokens or self.default_max_tokens or room
            max_tokens = min(room, max(default, options.min_tokens), most or room)
        elif max_tokens > room and self._config.clip_max_tokens:
            max_tokens = room
        elif max_tokens > room:
            text = (
                f"this model's maximum context length is {self._served.max_context} tokens, prompt and answer together; the prompt has "
                f"{n_prompt} and `max_tokens` is {max_tokens}: ask for {room} at most, or shorten the prompt"
            )
            raise ContextTooLong(text, param="max_tokens")
        eos_ids: tuple[int, ...] = () if options.ignore_eos else self._tokenizer.eos_ids
        stop_ids = tuple(dict.fromkeys((*eos_ids, *options.stop_ids)))
        return Stopping(max_tokens=max(1, max_tokens), min_tokens=options.min_tokens, stop_ids=stop_ids)

    async def _whole(self, exchange: Exchange, request: Request, prompts: Sequence[Prompt], choices: list[Choice], bell: Bell) -> None:
        options, pace = request.options, self._turns.pace()
        texts: list[list[str]] = [[] for _ in choices]
        scores = [self._scores() for _ in choices] if options.logprobs is not None else None
        fresh = {choice.index for choice in choices} if self._echoes(request) else set()
        left = choices
        while left:
            for choice in left:
                text, tokens = choice.pump()
                own = None if scores is None else scores[choice.index]
                if choice.index in fresh and (choice.n_tokens or choice.finish is not None):
                    fresh.discard(choice.index)
                    texts[choice.index].append(await self._echo(request, prompts, choice, own, pace))
                if options.max_tokens != 0:
                    texts[choice.index].append(text)
                    if own is not None:
                        own.add(tokens)
                if choice.finish is not None:
                    self._gateway.close(choice.flight, "a stop string", answered=True)
                elif choice.flight.error is not None and not choice.is_behind:
                    raise choice.flight.error
                await pace.breathe()
            left = [choice for choice in left if choice.finish is None]
            if left and not any(choice.is_behind for choice in left):
                await bell.wait()
                exchange.ledger.close(Span.OUT_HANDOFF, now_ns())
        chosen = [best for group in _groups(choices, options.best_of) for best in _best(group, options.n)]
        answers = []
        for index, choice in enumerate(chosen):
            assert choice.finish is not None
            logprobs = None if scores is None else scores[choice.index].json()
            answers.append(Answer(index=index, text="".join(texts[choice.index]), finish_reason=choice.finish, logprobs=logprobs))
            await pace.breathe()
        self._settle(exchange, choices)
        parts = []
        for part in self._response(self._head(exchange), answers, self._used(exchange, request, choices).usage()):
            parts.append(part)
            await pace.breathe()
        await exchange.respond_in_parts(200, parts)

    async def _stream(self, exchange: Exchange, request: Request, prompts: Sequence[Prompt], choices: list[Choice], bell: Bell) -> None:
        options, pace = request.options, self._turns.pace()
        continued = {choice.index for choice in choices if choice.replay.n_tokens}
        events = self._events(self._head(exchange), len(choices), include_usage=options.include_usage, continued=continued)
        positions = Positions(choices) if choices[0].flight.resumable is not None else None
        used = self._used(exchange, request, choices)
        left = choices
        echoes = self._echoes(request)
        fresh = {choice.index for choice in choices} - continued if echoes else set()
        try:
            while left:
                data = []
                for choice in left:
                    text, tokens = choice.pump()
                    before = choice.n_shown - sum(len(token.piece) for token in tokens)
                    is_first = choice.index in fresh and bool(choice.n_tokens or choice.finish is not None)
                    if echoes and not is_first:
                        before += len(prompts[choice.index // options.best_of].text)
                    scores = None if options.logprobs is None else events.scores(before)
                    if options.max_tokens == 0:
                        text, tokens = "", []
                    if is_first:
                        fresh.discard(choice.index)
                        text = await self._echo(request, prompts, choice, scores, pace) + text
                    if scores is not None:
                        scores.add(tokens)
                    now_usage = None
                    if options.continuous_usage:
                        used.look([choice])
                        now_usage = used.usage()
                    if text or (scores is not None and scores.n_tokens):
                        event = events.text(choice.index, text, scores=scores, usage=now_usage)
                        data.append(positions.mark(event, choice) if positions is not None else event)
                    if choice.finish is not None:
                        self._gateway.close(choice.flight, "a stop string", answered=True)
                        event = events.finish(choice.index, choice.finish, usage=now_usage)
                        if not choice.replay.finished:
                            data.append(positions.mark(event, choice, finished=True) if positions is not None else event)
                    elif choice.flight.error is not None and not choice.is_behind:
                        raise choice.flight.error
                    await pace.breathe()
                left = [choice for choice in left if choice.finish is None]
                if not left:
                    self._settle(exchange, choices)
                if data:
                    if not exchange.started:
                        await exchange.start_stream()
                    await exchange.write_event(b"".join(data))
                if left and not any(choice.is_behind for choice in left):
                    await self._wait(exchange, bell)
            used.look(choices)
            last = events.usage(used.usage()) if options.include_usage else b""
            if not exchange.started:
                await exchange.start_stream()
            last += DONE
        except RequestError as error:
            if not exchange.started:
                raise
            exchange.error = error
            last = error_event(error, exchange.public_id)
        await exchange.end_stream(last)

    async def _echo(self, request: Request, prompts: Sequence[Prompt], choice: Choice, scores: Scores | None, pace: Pace) -> str:
        """What goes in front: the prompt's text; its log probabilities are added to `scores`."""
        prompt = prompts[choice.index // request.options.best_of]
        if scores is not None:
            for tokens in echoed(self._tokenizer, choice.flight, prompt.n_added):
                scores.add(tokens)
                await pace.breathe()
        return prompt.text

    async def _wait(self, exchange: Exchange, bell: Bell) -> None:
        """For news; a client that hears nothing for long gets a comment, so that nothing between us and it gives up."""
        silence_s = self._config.keepalive_comment_s
        with trio.move_on_after(silence_s or float("inf")) as silence:
            await bell.wait()
        if silence.cancelled_caught:
            if not exchange.started:
                await exchange.start_stream()
            await exchange.write_comment(KEEP_ALIVE)
        else:
            exchange.ledger.close(Span.OUT_HANDOFF, now_ns())

    def _used(self, exchange: Exchange, request: Request, choices: Sequence[Choice]) -> Used:
        options = request.options
        used = Used(exchange.n_prompt, options.best_of, counts=options.max_tokens != 0)
        used.look(choices)
        return used

    def _settle(self, exchange: Exchange, choices: list[Choice], *, refused: bool = False) -> None:
        """What it used. Before its last byte is sent: a client that has it may come back, and its place must be free by then."""
        self._tell(exchange, choices)
        self._meter.end(exchange, 0 if refused and not exchange.n_generated else exchange.n_prompt + exchange.n_generated)

    def _tell(self, exchange: Exchange, choices: Sequence[Choice]) -> None:
        """What metrics and log want to know."""
        exchange.n_generated = sum(choice.n_tokens for choice in choices)
        exchange.n_cached = sum(choice.flight.n_cached for choice in choices)
        exchange.attempts = max((choice.flight.n_attempts for choice in choices), default=0)
        exchange.exact = all(choice.flight.exact for choice in choices)
        exchange.decisions = [decision for choice in choices for decision in choice.flight.decisions]
        exchange.finish_reasons = [choice.finish or "" for choice in choices]
        exchange.token_ns = [choice.flight.token_ns for choice in choices]

    def _head(self, exchange: Exchange) -> Head:
        return Head(request_id=exchange.answer_id, created=exchange.created, model=self._served.name)

    prompt_param: str
    _kind: type[Request]
    default_max_tokens: int | None  # None: what the context has room for

    @abstractmethod
    def _parse(self, body: bytes) -> Request: ...

    @abstractmethod
    def _prompts(self, request: Request) -> list[Prompt]: ...

    @abstractmethod
    def _prompt_logprobs(self, request: Request) -> int: ...

    @abstractmethod
    def _echoes(self, request: Request) -> bool: ...

    @abstractmethod
    def _scores(self) -> Scores: ...

    @abstractmethod
    def _response(self, head: Head, answers: Sequence[Answer], usage: Usage) -> Iterator[bytes]: ...

    @abstractmethod
    def _events(self, head: Head, n: int, *, include_usage: bool, continued: Container[int]) -> EventStream: ...


class ChatEndpoint(Endpoint[ChatRequest]):
    """`POST /v1/chat/completions`."""

    prompt_param, _kind = "messages", ChatRequest
    default_max_tokens = None

    def _parse(self, body: bytes) -> ChatRequest:
        return parse_chat(body)

    def _prompts(self, request: ChatRequest) -> list[Prompt]:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        parts = self._template.render_split(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.template_kwargs,
        )
        self._refuse_endless(sum(map(len, parts)))
        ids = self._tokenizer.encode_split(parts)
        if not ids:
            raise InvalidRequest("the messages render to an empty prompt; send some content", param="messages")
        return [Prompt(tuple(ids), "")]

    def _prompt_logprobs(self, request: ChatRequest) -> int:
        return -1

    def _echoes(self, request: ChatRequest) -> bool:
        return False

    def _scores(self) -> Scores:
        return ChatScores()

    def _response(self, head: Head, answers: Sequence[Answer], usage: Usage) -> Iterator[bytes]:
        return chat_response(head, answers, usage)

    def _events(self, head: Head, n: int, *, include_usage: bool, continued: Container[int]) -> EventStream:
        return ChatStream(head, n, include_usage=include_usage, continued=continued)


class CompletionEndpoint(Endpoint[CompletionRequest]):
    """`POST /v1/completions`."""

    prompt_param, _kind = "prompt", CompletionRequest
    default_max_tokens = 16  # as OpenAI and vLLM have it

    def _parse(self, body: bytes) -> CompletionRequest:
        return parse_completion(body)

    def _prompts(self, request: CompletionRequest) -> list[Prompt]:
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self._refuse_endless(len(prompt))
            ids = tuple(self._tokenizer.encode_prompt(prompt)) if isinstance(prompt, str) else prompt
            if len(ids) > self._served.max_context:
                raise self._too_long(str(len(ids)))
            if not ids:
                raise InvalidRequest("`prompt` has no tokens; send at least one", param="prompt")
            n_added = self._tokenizer.n_added(prompt) if isinstance(prompt, str) else 0
            text = self._tokenizer.decode(ids[n_added:], skip_special=False) if request.echo else ""
            prompts.append(Prompt(ids, text, n_added))
        return prompts

    def _prompt_logprobs(self, request: CompletionRequest) -> int:
        return request.prompt_logprobs

    def _echoes(self, request: CompletionRequest) -> bool:
        return request.echo

    def _scores(self) -> Scores:
        return CompletionScores()

    def _response(self, head: Head, answers: Sequence[Answer], usage: Usage) -> Iterator[bytes]:
        return completion_response(head, answers, usage)

    def _events(self, head: Head, n: int, *, include_usage: bool, continued: Container[int]) -> EventStream:
        return CompletionStream(head, n, include_usage=include_usage)


def _groups(choices: Sequence[Choice], size: int) -> list[Sequence[Choice]]:
    """The choices of each prompt."""
    return [choices[i : i + size] for i in range(0, len(choices), size)]


def _best(group: Sequence[Choice], n: int) -> list[Choice]:
    """Those with the highest mean log probability of a token, if there are more than are wanted."""
    if len(group) == n:
        return list(group)
    mean: Callable[[Choice], float] = lambda choice: -choice.logprob_sum / max(1, choice.n_tokens)  # noqa: E731
    return sorted(group, key=mean)[:n]
