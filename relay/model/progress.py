"""What is told while a model is made ready, to whoever shows it."""

from collections.abc import Callable
from typing import Literal

Stage = Literal["waiting", "downloading", "unpacking", "checking"]
Progress = Callable[[Stage, int, int], None]  # (stage, bytes done, bytes in all; 0 where unknown)
