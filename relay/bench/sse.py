"""Server-sent events: bytes as they come from the network in, the `data` of whole events out. Comments and other fields are dropped."""


class EventReader:
    """Of one stream."""

    __slots__ = ("_rest", "_return")

    def __init__(self) -> None:
        self._rest = b""
        self._return = False  # a carriage return came last: a line end whether or not its newline follows

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. A last event without its blank line is no event."""
        if self._return or b"\r" in data:
            data = self._newlines(data)
        if not self._rest and data.startswith(b"data: ") and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2:
            return [data[6:-2]]  # one event, whole and of one line: nearly all of them
        if self._rest:
            data = self._rest + data
        *blocks, self._rest = data.split(b"\n\n")
        return [payload for payload in map(_payload, blocks) if payload is not None]

    def _newlines(self, data: bytes) -> bytes:
        """Carriage returns are line ends too; one that ends `data` waits for what follows it."""
        if self._return:
            data = b"\r" + data
        self._return = data.endswith(b"\r")
        if self._return:
            data = data[:-1]
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _payload(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
