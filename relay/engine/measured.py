"""What a worker has measured of this machine, kept for its next lives: a restart in the midst of a recovery has better things to do."""

import json
import os
from collections.abc import Callable
from pathlib import Path


class Measured:
    """Named numbers in a file that ends with the server; None as a path keeps nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._values: dict[str, float] = {}
        if path is not None and path.exists():
            self._values = json.loads(path.read_bytes())

    def value(self, name: str, measure: Callable[[], float]) -> float:
        """As measured first."""
        if name not in self._values:
            self._values[name] = measure()
            if self._path is not None:
                new = self._path.with_suffix(".new")
                new.write_text(json.dumps(self._values))
                os.replace(new, self._path)
        return self._values[name]
