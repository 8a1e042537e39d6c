"""What a model file says about itself, key by key: a value is of the kind that was asked for, or a ModelError names the key.

In: the metadata of a GGUF file, or a config.json. A key that is there with the value null is as good as absent, as in config.json files.
"""

from collections.abc import Mapping
from typing import Any, Final

from relay.errors import ModelError

MOST: Final = (1 << 31) - 1  # no number of a model is larger; a damaged one could ask for any amount of memory
MOST_LAYERS: Final = 1024
MOST_EXPERTS: Final = 4096


class Keys:
    """`prefix` comes before every name, in the lookup and in errors."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self.prefix = prefix

    def get(self, name: str) -> Any:
        """The value as it is; None where there is none."""
        return self._values.get(self.prefix + name)

    def count(self, name: str, default: int | None = None, *, most: int = MOST) -> int:
        """A whole number of 1 or more."""
        value = self._given(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self._wrong(name, value, f"a whole number of 1 or more, up to {most}")
        return value

    def size(self, name: str) -> int:
        """A whole number; 0 where the key is absent."""
        value = self._given(name, 0)
        if type(value) is not int or not 0 <= value <= MOST:
            raise self._wrong(name, value, f"a whole number up to {MOST}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self._given(name, default)
        if type(value) not in (int, float) or not 0 < value <= MOST:
            raise self._wrong(name, value, f"a number above 0, up to {MOST}")
        return float(value)

    def limit(self, name: str) -> float:
        """A number above 0; 0 where the key is absent: no limit."""
        return 0.0 if self.get(name) is None else self.positive(name)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._given(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        """An object; None where the key is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return value

    def expect(self, name: str, served: object, why: str) -> None:
        """Refuse a key that says something that would be computed wrongly; an absent key says what is served."""
        value = self._given(name, served)
        if value != served:
            raise ModelError(f"`{self.prefix}{name}` is {value!r}, and {why} ({served!r}); use another model")

    def _given(self, name: str, default: object) -> Any:
        value = self.get(name)
        return default if value is None else value

    def _wrong(self, name: str, value: object, expected: str) -> ModelError:
        shown = repr(value)
        return ModelError(f"`{self.prefix}{name}` is {shown if len(shown) < 200 else shown[:200] + '...'}; expected {expected}")
