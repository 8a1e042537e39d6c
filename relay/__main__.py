"""`python -m relay` is the `relay` command. Until everything is imported, Ctrl-C just ends it."""

import signal


def main() -> None:
    """Entry point of the `relay` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody wants it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from relay.cli import main as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        from relay.cli import main as run
    run()


if __name__ == "__main__":
    main()
