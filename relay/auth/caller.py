"""Who a request comes from, once that is known: an API key's name and rights, or anyone where the server has no keys."""

import msgspec

from relay.errors import Forbidden
from relay.messages import Limits


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is the key's, None where no keys are configured or the route is open. `models`: empty is all of them."""

    name: str | None = None
    scopes: tuple[str, ...] = ()
    limits: Limits = Limits()
    models: tuple[str, ...] = ()

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

    def check_model(self, model: str) -> None:
        """Raises Forbidden."""
        if not self.may_use(model):
            raise Forbidden(f"the API key `{self.name}` may use {', '.join(self.models)}, and not `{model}`", param="model")


ANYONE = Caller()
