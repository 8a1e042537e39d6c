"""A link for tests of one actor: what it should carry is kept."""

from relay.messages import Address, Message


class Road:
    """`sent`: in order, whoever it is for."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def deliver(self, to: Address, body: Message) -> None:
        self.sent.append(body)

    def credit(self, to: Address, n: int) -> None:
        pass
