"""Which deaths convict a request. Pure.

The root reads from the step board who was being computed when a worker died. That makes suspects: each takes its first step on the next
worker alone. What a death there proves depends on who can cause such a death. A crash (a signal of the processor's, an abort, an exit) or a
step that never ends is the step's own doing: one alone convicts. SIGKILL and silence anybody can cause: an operator, the kernel when memory
is short, SIGSTOP. They convict the third time in a row, each time alone in the step; an innocent request is hit thrice in steps of some
milliseconds by nobody who does not aim at it.
"""

from collections import OrderedDict
from typing import Final, Literal

Blame = Literal["nobody", "step", "anybody"]  # who may have caused a death: it was wanted; the step alone; or also somebody outside
KILLS_THAT_CONVICT: Final = 3
_MOST: Final = 4096
_CRASHES: Final = frozenset(("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"))


def blame_of(ended: str) -> Blame:
    """Of a process that nobody here has killed. `ended`: "exit N", or the name of the signal."""
    return "step" if ended.startswith("exit ") or ended in _CRASHES else "anybody"


class Suspicion:
    """Counts for each request the deaths in its lone steps that anybody may have caused."""

    def __init__(self) -> None:
        self._killed: OrderedDict[str, int] = OrderedDict()

    def convicts(self, suspects: tuple[str, ...], lone: bool, blame: Blame) -> bool:
        """Whether this death convicts the one request that it struck. lone: it was in its step alone, to be tried.

        A request that has gained tokens in two steps is tried again only after a death in company, which ends its count here.
        """
        if not lone:
            for request_id in suspects:
                self._killed.pop(request_id, None)
            return False
        (suspect,) = suspects
        kills = self._killed.pop(suspect, 0) + 1
        if blame == "step" or kills >= KILLS_THAT_CONVICT:
            return True
        self._killed[suspect] = kills
        if len(self._killed) > _MOST:
            self._killed.popitem(last=False)
        return False
