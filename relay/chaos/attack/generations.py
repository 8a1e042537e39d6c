"""Requests that are served, and are hostile all the same: poison, answers of megabytes, bodies to be remembered, streams of others."""

import json
import random
import uuid

from relay.chaos.attack.target import Broken, Target, request, status

_LOGPROBS_TAKE_S = 2.0  # of computing, measured on prompts alone
_PAD = 1 << 20
_CHOICES = 16


def poison(target: Target, draw: random.Random) -> None:
    """A prompt that kills whoever computes it, another one each time; then the same again, which must be known by now."""
    if target.poison_token is None:
        return
    prompt = [*(draw.randrange(1, 200) for _ in range(4)), target.poison_token]
    for turn in range(2):
        code, body = target.post("/v1/completions", {"prompt": prompt, "max_tokens": 4})
        found = body.get("error", {}).get("code")
        if code == 200:
            raise Broken(f"a prompt with the poison token was served: {prompt}")
        if found == "poison_request" and turn and code >= 500:
            raise Broken(f"a convicted prompt is answered with {code} again, which clients retry: {prompt}")
        if found != "poison_request":
            return  # a worker that is just not there: another round will tell


def logprobs(target: Target, draw: random.Random) -> None:
    """The prompts' own scores with 20 others for each token: an answer much longer than its request."""
    each = max(16, min(target.max_context - 8, int(target.tokens_per_s * _LOGPROBS_TAKE_S / 4), 1_000))
    prompts = [[draw.randrange(4, 200) for _ in range(each)] for _ in range(4)]
    fields = target.unpoisoned(prompt=prompts, max_tokens=1, echo=True, logprobs=20, stream=draw.random() < 0.5)
    code, body = target.post("/v1/completions", fields)
    if code == 200 and not fields["stream"] and len(body["choices"]) != len(prompts):
        raise Broken(f"{len(prompts)} prompts of {each} tokens with echo and logprobs: {len(body['choices'])} choices")
    if code >= 500 and code != 503:
        raise Broken(f"{len(prompts)} prompts of {each} tokens with echo and logprobs: {code} {body}")


def resumables(target: Target, draw: random.Random) -> None:
    """A large body, many choices, and all to be remembered; read to the end, or left."""
    where = draw.choice(("metadata", "user", "prompt"))
    fields = target.unpoisoned(prompt="Hi", max_tokens=3, n=_CHOICES, best_of=_CHOICES, stream=True)
    fields["temperature"] = 1
    fields["seed"] = draw.randrange(1000)
    fields[where] = {"pad": "x" * _PAD} if where == "metadata" else "x" * _PAD
    data = request("POST", "/v1/completions", json.dumps(fields).encode(), f"X-Relay-Resume: {uuid.uuid4()}")
    if draw.random() < 0.5:
        with target.connect() as sock:
            sock.sendall(data)
            sock.recv(1024)
        return
    answer = target.send(data)
    if answer and status(answer) >= 500 and status(answer) != 503:
        raise Broken(f"a resumable request with {_PAD} bytes of `{where}` and n={_CHOICES}: {answer[:300]!r}")


def strangers(target: Target, draw: random.Random) -> None:
    """Ask for a stream of another client: by its name without its secret, with another's, and by what its ID might be."""
    name, secret = f"victim-{uuid.uuid4()}", f"{uuid.uuid4()}"
    fields = target.unpoisoned(prompt="The harbour", max_tokens=24, stream=True, ignore_eos=True)
    headers = (f"X-Request-ID: {name}", f"X-Relay-Resume: {secret}")
    with target.connect() as sock:
        sock.sendall(request("POST", "/v1/completions", json.dumps(fields).encode(), *headers))
        head = sock.recv(4096)
        if not head or status(head) != 200:
            return
        body = head
        while b"data: " not in body:
            part = sock.recv(4096)
            if not part:
                return
            body += part
        ours = (
            head.lower().partition(b"x-relay-resume: ")[2].partition(b"\r\n")[0].decode()
        )  # the server's own name, which nobody can guess
        guesses = [
            (name, ""),
            (name, str(uuid.uuid4())),
            (name, name),
            (name, ours),
            (f"{name}/0", secret[:8]),
            (ours[:-1], ""),
            (ours[:-8], ""),
        ]
        guesses += [(ours.rpartition("-")[0], ""), (ours[:-1] + ("0" if ours[-1:] != "0" else "1"), ""), ("%2e%2e", ""), ("*", secret)]
        for asked, said in guesses:
            more = (f"X-Relay-Resume: {said}",) if said else ()
            answer = target.send(request("GET", f"/v1/requests/{asked or 'x'}/stream", b"", *more))
            if answer and status(answer) == 200:
                raise Broken(f"a stranger reads a stream: name `{asked}` of `{name}`, secret `{said}`: {answer[:200]!r}")
