"""Who a request comes from, once that is known: an API key's name and rights, or anyone where the server has no keys."""

import msgspec

from relay.errors import Forbidden, InvalidRequest
from relay.messages import Limits


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is the key's, None where no keys are configured or the route is open. `models`: empty is all of them.

    `best_priority`: the lowest number it may ask for, None for what anybody may.
    """

    name: str | None = None
    scopes: tuple[str, ...] = ()
    limits: Limits = Limits()
    models: tuple[str, ...] = ()
    best_priority: int | None = None

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes

    def has(self, scope: str) -> bool:
        """The admin scope holds the others."""
        return scope in self.scopes or self.is_admin

    @property
    def sees_only(self) -> str | None:
        """The key whose requests it may look at; None is everybody's."""
        return None if self.is_admin else self.name

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def check_priority(self, priority: int, anybody: int) -> None:
        """`anybody` may ask for this or a higher number. Raises InvalidRequest."""
        best = anybody if self.best_priority is None else self.best_priority
        if priority < best:
            who = "a request here" if self.name is None else f"the API key `{self.name}`"
            raise InvalidRequest(
                f"`priority` is {priority}, and {who} may ask for {best} or a higher number (lower ones go first); ask for that, or ask "
                "whoever runs this server for more",
                param="priority",
            )

    def namespace(self, salt: str, *, shared: bool) -> str:
        """Of its prefixes in caches: `salt` is the request's own. Unless caches are `shared`, a key finds only what it has sent itself:
        how soon a prompt is answered would tell it that another has sent the same. A key's name has no line break."""
        return salt if shared or self.name is None else f"{self.name}\n{salt}"

    def check_model(self, model: str) -> None:
        """Raises Forbidden."""
        if not self.may_use(model):
            raise Forbidden(f"the API key `{self.name}` may use {', '.join(self.models)}, and not `{model}`", param="model")


ANYONE = Caller()
