"""A load generator for any OpenAI-compatible server: what `relay bench` runs. It knows nothing of the server but its HTTP answers.

What the words mean, everywhere in here:

- **start** of a request: when it was *meant* to be sent. With a rate or a trace that is its place in the schedule, however late the
  generator or the network were, so that a slow server cannot hide behind requests that were not sent (coordinated omission). In a closed
  loop it is when its stream became free. Connecting is inside.
- **first token**: the first chunk with text that is not empty. A chunk that only tells the role does not count, a comment neither.
- **TTFT**: first token - start. **E2E**: `[DONE]` - start.
- **TPOT**: (last chunk with text - first token) / (tokens - 1), with tokens = `usage.completion_tokens` where the server tells it, else
  the number of chunks with text. An answer of one token has none.
- **ITL**: the time between two successive chunks with text. A chunk may hold several tokens, and a token may have no text of its own (half
  a character), so this is by chunk arrival and not by token; `chunks` against `output_tokens` of the report tells how far apart they are.
- **ok**: status 200, a well-formed stream, `[DONE]` at its end, no error event. Anything else is a failure and counted by kind: `connect`,
  `http_NNN`, `error_event`, `cut` (the stream ended without `[DONE]`), `timeout`, `malformed`. Latencies are of ok requests only.
- **goodput**: requests (and their tokens) that met every limit of `--slo`, with the failed ones in the denominator. A limit on TPOT is
  met by an answer of one token; a limit on TTFT is not met by an answer without text.
- **tokens/s**: tokens of ok requests over the time from the first start to the last end.
- **saturated**: the generator itself was late (lag p99 of its loop) or used most of a core: then the figures are not the server's alone.
"""
