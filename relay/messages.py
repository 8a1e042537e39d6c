"""Every message between actors, in the order a request meets them.

An epoch numbers the lives of a worker and fences memory; an attempt numbers the placements of one request and fences its stream.
`(request_id, attempt)` is in every message of a request. Token ids travel as tuples, never text and never tensors. A `trail` is what the
ledger has to say of the way so far: pairs of (span number, monotonic nanoseconds at its end), oldest first (`relay.ledger`).
"""

from typing import Literal

import msgspec

Trail = tuple[tuple[int, int], ...]
Key = tuple[str, int]  # (request_id, attempt)


class Address(msgspec.Struct, frozen=True, order=True, array_like=True):
    """An actor in one life of its worker. Mail to another life is never delivered."""

    actor: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.actor}@{self.epoch}"


class Up(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Runtime to every actor: this address can be written to."""

    address: Address


class Down(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Runtime to whoever monitors: the address is dead, its memory writes have ended, and this is its last message.

    `suspects` are the requests whose step it died in, unless it was killed on purpose; `lone`: that step held but one, to try it, and the
    death is proof (`relay.runtime.suspicion`).
    """

    address: Address
    reason: str
    suspects: tuple[str, ...] = ()
    lone: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How each token is drawn. The random number of a token depends on (seed, choice, position) and nothing else.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. logprobs: -1 off, else how many alternatives.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1

    @property
    def penalizes(self) -> bool:
        """Whether a token's chances depend on which came before, beyond the model's own numbers."""
        return self.repetition_penalty != 1.0 or bool(self.frequency_penalty) or bool(self.presence_penalty)


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """When generation ends. `stop_ids` end it with reason "stop" once `min_tokens` are there; before that they are not drawn."""

    max_tokens: int
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()


FinishReason = Literal["stop", "length"]


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one token: its own log probability, and the most likely ids with theirs, best first."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """What one API key may use: requests and tokens in any minute, requests at once. 0 is no limit."""

    requests: int = 0
    tokens: int = 0
    concurrency: int = 0


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """How much of its minute a key has left, and in how many milliseconds all of it is back."""

    requests_left: int = 0
    requests_reset_ms: int = 0
    tokens_left: int = 0
    tokens_reset_ms: int = 0


class Reserve(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Quota to limiter: may this request of `key` start? If so it is counted, with `n_tokens`: its prompts and the most it may generate."""

    request_id: str
    key: str
    limits: Limits
    n_prompt: int
    n_tokens: int
    quota: Address


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Limiter to quota: it may, and is counted until `Settle`."""

    request_id: str
    standing: Standing


class Denied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Limiter to quota: it may not, and nothing was counted. `retry_after_ms`: when this very request would fit, if nothing else came."""

    request_id: str
    limit: Literal["requests", "tokens", "concurrency"]
    retry_after_ms: int
    standing: Standing


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Quota to limiter: the request has ended and used `n_tokens`. Costs no credit: what frees room must not wait for room."""

    request_id: str
    quota: Address
    n_tokens: int


class Use(msgspec.Struct, frozen=True, array_like=True):
    """One granted request as told to a new limiter. An age and no stamp: two hosts' clocks have nothing in common."""

    request_id: str
    key: str
    age_ns: int
    n_prompt: int
    n_tokens: int
    is_open: bool


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Quota to a limiter it has just heard of: what its predecessor granted me and still counts."""

    quota: Address
    uses: tuple[Use, ...]


class Oversized(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Runtime to whoever sent it: your message about this attempt fits in no frame and was not sent. End the attempt."""

    request_id: str
    attempt: int
    to: Address
    reason: str


class Resumable(msgspec.Struct, frozen=True, array_like=True):
    """Of a stream that another gateway may continue: the client's name for it, who may ask by that name, and what only gateways read.

    `owner` is the name of an API key, `secret` what the client chose where it has none; without either, the server's own ID alone gives
    access. The envelope is the request's and not a choice's: the first choice carries it, the others have none. `created`: Unix seconds.
    """

    public_id: str
    envelope: bytes
    owner: str = ""
    secret: str = ""
    created: int = 0


class Admit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gateway to router: place this attempt. `tokens` is the prompt and what was generated by earlier attempts.

    `dead` are addresses that earlier attempts met dead or drained: the router may not know yet, and would send each there again.
    `deadline_ns` is on the host's monotonic clock, 0 for none. `salt` is the namespace of its prefix in caches.
    `prompt_logprobs` is -1 for none, else how many alternatives for each token of the prompt. `lone`: it was in a step that a worker died
    in, so it shares no step with others until it has gained tokens in two. `logprobs` are of the generated tokens among `tokens`, where a
    log of them is to be kept. `again`: the request was taken before, so it is not refused for want of room now.
    """

    request_id: str
    attempt: int
    tokens: tuple[int, ...]
    n_prompt: int
    sampling: Sampling
    stopping: Stopping
    gateway: Address
    lone: bool = False
    salt: str = ""
    priority: int = 0
    deadline_ns: int = 0
    prompt_logprobs: int = -1
    resumable: Resumable | None = None
    logprobs: tuple[Logprobs, ...] = ()
    again: bool = False
    dead: tuple[Address, ...] = ()
    trail: Trail = ()


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Router or decode to gateway: this attempt is not placed and will not be; `code` is one of `relay.errors`."""

    request_id: str
    attempt: int
    code: str
    message: str
    retry_after_s: float | None = None


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """One worker as the router weighed it for one attempt: tokens of its prefix likely cached there, its load, its score (least wins).

    Of a prefill worker load and score are tokens to compute, and what it computes for others already counts as cached; of a decode worker,
    shares of its blocks.
    """

    address: Address
    n_cached: int
    load: float
    score: float


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Why an attempt went where it went: the rule, and at most four candidates of each role, best first."""

    rule: str
    prefill: tuple[Candidate, ...]
    decode: tuple[Candidate, ...]


class Expect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Router to decode: allocate, then have `prefill` fill the blocks (or fill them yourself when it is None)."""

    admit: Admit
    prefill: Address | None
    router: Address
    decision: Decision
    trail: Trail


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode to gateway: blocks are allocated; watch me and send `Cancel` here. (From the router, a Cancel could overtake its Expect.)"""

    request_id: str
    attempt: int
    decode: Address
    decision: Decision


class Declined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode to router: no room for this one now; `n_free_blocks` is what there is."""

    request_id: str
    attempt: int
    decode: Address
    n_free_blocks: int


class PoolHandle(msgspec.Struct, frozen=True, array_like=True):
    """One life's KV pool on a device. handle: 64 bytes that name a whole allocation, in which the pool lies from `offset` on for `n_bytes`.

    epoch, nonce: are written before the pool, so that memory that took its place is told from it. device: its number, as nvidia-smi counts.
    """

    handle: bytes
    offset: int
    n_bytes: int
    epoch: int
    nonce: int
    device: int = 0


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: the work, and in it the lease: the right to write `blocks` of decode's pool until Prefilled, Returned or Down.

    `blocks` hold the KV of tokens from `n_present` on (a multiple of the block size): what lies before is in decode's pool already. For a
    prefill actor of decode's own worker they are the whole block table, of which those from `n_present` on are leased. `pool`: how to open
    a pool on a device; None where the root gave a descriptor of it.
    """

    request_id: str
    attempt: int
    tokens: tuple[int, ...]
    n_prompt: int
    sampling: Sampling
    stopping: Stopping
    gateway: Address
    decode: Address
    blocks: tuple[int, ...]
    pool: PoolHandle | None = None
    n_present: int = 0
    lone: bool = False
    salt: str = ""
    priority: int = 0
    deadline_ns: int = 0
    prompt_logprobs: int = -1
    trail: Trail = ()


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request in a `Tokens` frame: `ids[0]` has index `first` among the request's generated tokens.

    `trail` is of this request alone, before the step's own; `finish` is empty while it goes on. `n_cached` prompt tokens came from a
    cache (told once, with the first token). `prompt_logprobs` come with the first token, one for each prompt token but the first, or,
    where a frame would not hold them, in rows before it that have no ids: from number `scores_from` on.
    """

    request_id: str
    attempt: int
    first: int
    ids: tuple[int, ...]
    trail: Trail = ()
    finish: FinishReason | Literal[""] = ""
    logprobs: tuple[Logprobs, ...] = ()
    n_cached: int = 0
    prompt_logprobs: tuple[Logprobs, ...] = ()
    scores_from: int = 0


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode to gateway, one frame a step with all requests' rows; prefill to gateway, the first token of one request.

    `trail` is of the step and applies to every row. `exact`: the source's bits don't depend on what shares a batch (`engine.exact`).
    """

    source: Address
    rows: tuple[Row, ...]
    trail: Trail = ()
    exact: bool = True


class Scores(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill to decode, ahead of `Prefilled`: log probabilities of the prompt, as many as a frame takes, in order."""

    request_id: str
    attempt: int
    logprobs: tuple[Logprobs, ...]


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: the leased blocks are written and the lease is over. Carries the first token a second time.

    `checksums`: uint64 [n_layers, len(blocks)] little-endian, of each leased block's bytes (`relay.kv.checksum`); empty where the blocks
    were computed in place.
    """

    request_id: str
    attempt: int
    first: Row
    checksums: bytes


class Revoke(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode to prefill: stop writing this lease and say so with `Returned`."""

    request_id: str
    attempt: int
    decode: Address


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill to decode: I do not write this lease any more (also the answer for one never heard of).

    `reason`: why the request cannot be computed, by nobody.
    """

    request_id: str
    attempt: int
    reason: str = ""


class Left(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill or decode to router: this attempt holds no place at `address` any more, however it ended.

    `n_generated` of one that `finished` feeds the estimate of how long answers are.
    """

    request_id: str
    attempt: int
    address: Address
    n_generated: int = 0
    finished: bool = False


class Displaced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode or router to gateway: this attempt cannot go on; try the next. `dead` are addresses that take nothing more.

    `suspect`: it was in the step that a worker died in; `convicted`: it was alone in it, or nobody can compute it, as `reason` says.
    `lost`: a resumed one of which nothing is left. `drained`: nothing has failed, its worker is asked to end. `reader`: it is told to that
    reader and none that came later (`Resume.reader`); None: to whoever reads.
    """

    request_id: str
    attempt: int
    reason: str
    dead: tuple[Address, ...] = ()
    suspect: bool = False
    convicted: bool = False
    lost: bool = False
    drained: bool = False
    reader: int | None = None
    trail: Trail = ()


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gateway to router or decode: nobody waits for this attempt. Idempotent; leaves a tombstone where the attempt is not known yet.

    Of no effect on a resumable attempt that `gateway` does not read (any more). `answered`: its client has all that it wanted, as with a
    stop string, so that its length is an answer's.
    """

    request_id: str
    attempt: int
    reason: str
    gateway: Address | None = None
    answered: bool = False


class Detach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gateway to decode: the client of this resumable attempt has gone; go on for a while, somebody may `Resume` it. Or has already.

    Is answered with `Spent` when the attempt has ended, unless this gateway resumes it itself.
    """

    request_id: str
    attempt: int
    gateway: Address


class Spent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode to the gateway whose client left this attempt: it has ended, and has generated `n_generated` tokens in all.

    `resumed`: it goes on for a reader at another gateway, which is charged for it from now on.
    """

    request_id: str
    attempt: int
    n_generated: int
    resumed: bool = False


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gateway to decode: from now on this attempt is mine; send all its tokens, from the first on.

    `reader` tells one reader from the next, also at the same gateway: later ones have higher numbers.
    """

    request_id: str
    attempt: int
    gateway: Address
    reader: int = 0


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to router: place nothing more at `address`; it is being drained."""

    address: Address


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One attempt that a decode worker holds, as told to a new router."""

    request_id: str
    attempt: int
    gateway: Address
    prefill: Address | None
    n_blocks: int


class Announced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to a router it has just heard of: what I can do and what I hold.

    `max_running` sequences at most in one decode batch; `n_blocks` in the pool of `block_tokens` tokens each; `cached` as in `Cached`.
    A `reserve` takes this role only while nobody lives whose own it is; `prefills`: to compute prompts is a role of this worker's own.
    """

    address: Address
    role: Literal["prefill", "decode"]
    worker: str
    n_blocks: int
    block_tokens: int
    max_running: int
    reserve: bool = False
    prefills: bool = False
    holdings: tuple[Holding, ...] = ()
    cached: bytes = b""


class Cached(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Worker to router: prefixes that its cache has gained and lost since the last time, as key hints of 8 bytes each, joined.

    epoch: of the life that says so, whose news may come when it is over.
    """

    worker: str
    epoch: int
    added: bytes = b""
    removed: bytes = b""


class Convicted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gateway to router, router to the other gateways: requests with this digest (`relay.policy.poison`) killed workers; refuse them until
    then, on the host's monotonic clock. A new router hears it from the gateways, a new gateway from the router."""

    digest: bytes
    until_ns: int


GatewayInbox = Up | Down | Oversized | Refused | Placed | Tokens | Displaced | Spent | Convicted
RouterInbox = Up | Down | Oversized | Announced | Withdrawn | Cached | Admit | Declined | Left | Cancel | Convicted
DecodeInbox = Up | Down | Oversized | Expect | Scores | Prefilled | Returned | Cancel | Detach | Resume
PrefillInbox = Up | Down | Oversized | Prefill | Revoke
QuotaInbox = Up | Down | Granted | Denied
LimiterInbox = Up | Down | Claim | Reserve | Settle

Message = (
    Up
    | Down
    | Oversized
    | Announced
    | Withdrawn
    | Cached
    | Claim
    | Reserve
    | Granted
    | Denied
    | Settle
    | Admit
    | Refused
    | Expect
    | Placed
    | Declined
    | Prefill
    | Tokens
    | Scores
    | Prefilled
    | Revoke
    | Returned
    | Left
    | Displaced
    | Convicted
    | Cancel
    | Detach
    | Spent
    | Resume
)
