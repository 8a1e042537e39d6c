"""`scripts/attack [--seconds N] [CONFIG]`: prints one line of JSON; status 0 if everything held. Ends within N + 60 s."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import click

from relay.chaos.attack.run import NAMES, AttackRun, watch
from relay.chaos.attack.target import Broken
from relay.chaos.server import ServerUnderTest

_POISON = 31_337


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/attack", description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of quiet and of attacks")
    parser.add_argument("--longer", type=float, default=60.0, metavar="SECONDS", help="that start, end and audit may take beyond that")
    parser.add_argument("--only", action="append", choices=NAMES, help="this attack; may be there several times. Default: all")
    parser.add_argument("--tokens", type=int, default=16, help="of an honest client's answer, at most")
    parser.add_argument("--poison-token", type=int, default=_POISON, help="an id of the model's; a worker that computes it is killed")
    parser.add_argument(
        "--no-ttft-rule", action="store_true", help="report how late first tokens come, and demand nothing: for busy machines"
    )
    parser.add_argument("--log", type=Path, help="where the server's log is kept")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server that we started ends with us
    deadline_s = time.monotonic() + args.seconds + args.longer
    # while the only gateway drains nobody is answered, and a reader that reads nothing can prolong that by all of drain_s
    runtime = {"poison_token": args.poison_token, "hang_s": 5.0, "silent_s": 2.0, "drain_s": 5.0}
    with ServerUnderTest(args.config, runtime=runtime, gateway={"resume_grace_s": 5.0}) as server:
        run = AttackRun(server, args.only or NAMES, args.poison_token, args.seed, deadline_s)

        def tell() -> None:
            if args.log is not None:
                args.log.write_text(server.log(), encoding="utf-8")
            click.echo(json.dumps({"config": str(args.config), **run.summary()}))

        timer = watch(run, tell)
        try:
            run.run(args.seconds, n_tokens=args.tokens, ttft_rule=not args.no_ttft_rule)
        except (OSError, AssertionError, Broken) as error:
            run.give_up(f"{type(error).__name__}: {error}")
        run.end()
        timer.cancel()
        tell()
    raise SystemExit(0 if run.summary()["held"] else 1)


if __name__ == "__main__":
    main()
