"""How a run says that a law was broken."""


class Violation(Exception):
    """`law` is one of few names, for tables; the text says who broke it and how."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"{law}: {text}")
        self.law = law
