"""An HTTP/1.1 response: bytes as they come in, its status and the bytes of its body out. No I/O, and nothing per chunk but slicing.

Written by hand because it is the generator's hottest path but one: h11 takes about fifteen times as long for a chunk of one token.
"""

_MOST_HEAD = 64 << 10
_CRLF = -2  # what stands after a chunk
_UNTIL_EOF = -1


class ResponseReader:
    """`status` is 0 until the head is there; `problem` is not empty once the bytes are not HTTP; then nothing more is read."""

    __slots__ = ("_chunked", "_left", "_rest", "_trailers", "complete", "headers", "keep_alive", "problem", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.keep_alive = False
        self.complete = False
        self.problem = ""
        self._rest = b""
        self._chunked = self._trailers = False
        self._left = 0  # bytes of the chunk, or of the body, still to come

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body."""
        if not self.status:
            head = self._rest + data
            while not self.status and not self.problem:
                end = head.find(b"\r\n\r\n")
                if end < 0:
                    self._rest = head
                    if len(head) > _MOST_HEAD:
                        self.problem = f"a response head of more than {_MOST_HEAD} bytes"
                    return b""
                self._read_head(head[:end])
                head = head[end + 4 :]
            data, self._rest = head, b""
        if self.complete or self.problem:
            return b""
        if self._chunked:
            return self._read_chunks(data)
        if self._left == _UNTIL_EOF:
            return data
        body = data[: self._left]
        self._left -= len(body)
        self.complete = self._left == 0
        return body

    def end(self) -> None:
        """The server closed: that completes a body of no stated length."""
        if self.status and self._left == _UNTIL_EOF and not self._chunked:
            self.complete = True

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        parts = first.split(b" ", 2)
        if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
            self.problem = f"not an HTTP/1.1 response: {first[:80]!r}"
            return
        status = int(parts[1])
        if 100 <= status < 200:
            return
        self.status = status
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self.keep_alive = parts[0] == b"HTTP/1.1" and self.headers.get(b"connection", b"").lower() != b"close"
        length = self.headers.get(b"content-length", b"")
        if self.headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._chunked = True
        elif length.isdigit():
            self._left = int(length)
            self.complete = self._left == 0
        else:
            self._left = _UNTIL_EOF
            self.keep_alive = False

    def _read_chunks(self, data: bytes) -> bytes:
        if self._rest:
            data = self._rest + data
        at, pieces = 0, []
        while True:
            if self._left > 0:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._left = _CRLF
            if self._left == _CRLF:
                if len(data) - at < 2:
                    break
                at += 2
                self._left = 0
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            line = data[at:end]
            at = end + 2
            if self._trailers:
                if not line:
                    self.complete = True
                    break
            elif not self._read_size(line):
                break
        self._rest = data[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_size(self, line: bytes) -> bool:
        try:
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            self._left = -1
        if self._left < 0:
            self.problem = f"not the size of a chunk: {line[:40]!r}"
        self._trailers = self._left == 0
        return not self.problem
