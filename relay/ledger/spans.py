"""The names of time: every nanosecond of a request belongs to one of these.

A span is named by what it was, at its end. Numbers travel in trails and index ledger slots; names are what people see.
"""

from enum import IntEnum


class Span(IntEnum):
    """In the order a request meets them."""

    GATEWAY_BODY = 0  # reading the body from the socket
    GATEWAY_AUTH = 1  # keys and limits
    GATEWAY_QUEUE = 2  # waiting for the gateway itself: a tokenizer thread, a router that is not there
    GATEWAY_TOKENIZE = 3  # parsing, template, tokenizing
    HOP = 4  # a message on its way between two actors; of tokens, from the end of their step
    ROUTE_DECIDE = 5  # the router's own work
    PREFILL_QUEUE_CAPACITY = 6  # in the router: no worker had a place
    PREFILL_QUEUE_BLOCKS = 7  # at a prefill worker: its pool was full
    PREFILL_QUEUE_BEHIND_PREFILL = 8  # at a prefill worker: other prompts came first
    PREFILL_HOST = 9  # a step that holds its chunk: scheduling, sampling
    PREFILL_FLOOR = 10  # the least that step's arithmetic and bytes can take on this machine
    PREFILL_EXCESS = 11  # what it took beyond
    PREFILL_INTERLEAVE = 12  # between its chunks: steps of others
    KV_LEASE_WAIT = 13  # at a decode worker: until blocks were allocated
    KV_PUSH = 14  # waiting for the copy into the decode worker's pool, beyond the compute it hid behind
    KV_VERIFY = 15  # checksums
    DECODE_QUEUE = 16  # adopted, until its first step began
    DECODE_HOST = 17  # between and around steps: scheduling, sampling
    DECODE_FLOOR = 18
    DECODE_EXCESS = 19
    DECODE_INTERFERENCE = 20  # prefill chunks in the same step
    DECODE_PREEMPTED = 21  # out of blocks: waiting, and computing its KV again
    OUT_DETOKENIZE = 22  # ids into text, stop strings, SSE
    OUT_HANDOFF = 23  # arrived at the gateway, until the task that writes took it
    OUT_WRITE_BLOCKED = 24  # the client's socket did not take it
    RETRY_WASTED = 25  # attempts that died, from the last token they gave
    CANCELLED = 26  # from the last news until the client left, or a deadline passed: work that nobody took
    UNACCOUNTED = 27  # a hook is missing: a bug of ours

    @property
    def label(self) -> str:
        """As people see it: `prefill.queue.blocks`."""
        return _LABELS[self]


def _label(name: str) -> str:
    for head in ("GATEWAY_", "ROUTE_", "PREFILL_QUEUE_", "PREFILL_", "KV_", "DECODE_", "OUT_", "RETRY_"):
        if name.startswith(head):
            return head.lower().replace("_", ".") + name.removeprefix(head).lower()
    return name.lower()


_LABELS = {span: _label(span.name) for span in Span}
N_SPANS = len(Span)
