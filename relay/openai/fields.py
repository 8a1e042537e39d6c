"""One JSON object of a body, read field by field: each value with the type and range that it must have, or InvalidRequest naming it.

`null` is the same as absent everywhere. A boolean is never a number. 5.0 is the integer 5: JSON has one kind of number, and some clients
write all of them so. What nobody reads is ignored.
"""

from typing import Any, TypeVar

from relay.errors import InvalidRequest
from relay.openai.body import shown

INT64 = (1 << 63) - 1
INT32 = (1 << 31) - 1

D = TypeVar("D")
_SURELY_ENOUGH = 1 << 20  # a limit that the size of the body sets first is not worth a word


def wrong(param: str, expected: str, value: Any) -> InvalidRequest:
    """The error of a value that is not what was expected."""
    return InvalidRequest(f"`{param}` is {shown(value)}; expected {expected}", param=param)


class Fields:
    """`values` as they were sent, found at `at` of the body ("" is the body itself)."""

    __slots__ = ("_at", "_values")

    def __init__(self, values: dict[str, Any], at: str = "") -> None:
        self._values = values
        self._at = at

    def path(self, name: str) -> str:
        """How errors call the field: `messages[1].content`."""
        return f"{self._at}.{name}" if self._at else name

    def get(self, name: str) -> Any:
        """The value as it was sent; None if absent."""
        return self._values.get(name)

    def wrong(self, name: str, expected: str) -> InvalidRequest:
        """The error of a field that is not what was expected, or is missing."""
        if name not in self._values:
            return InvalidRequest(f"`{self.path(name)}` is missing; expected {expected}", param=self.path(name))
        return wrong(self.path(name), expected, self._values[name])

    def flag(self, name: str, default: D) -> bool | D:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.wrong(name, "true or false")

    def integer(self, name: str, low: int, high: int, default: D) -> int | D:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and low <= value <= high:
            return value
        raise self.wrong(name, f"an integer from {low} to {high}")

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if type(value) in (int, float) and low <= value <= high:
            return float(value)
        raise self.wrong(name, f"a number from {low:g} to {high:g}")

    def string(self, name: str, most: int, default: D) -> str | D:
        """Up to `most` characters."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, str) and len(value) <= most:
            return value
        raise self.wrong(name, f"a string of at most {most} characters")

    def array(self, name: str, most: int) -> list[Any] | None:
        """Up to `most` items of any type."""
        value = self._values.get(name)
        if value is None or (isinstance(value, list) and len(value) <= most):
            return value
        raise self.wrong(name, f"an array of at most {most}" if most < _SURELY_ENOUGH else "an array")

    def object(self, name: str) -> "Fields | None":
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, dict):
            return Fields(value, self.path(name))
        raise self.wrong(name, "an object")
