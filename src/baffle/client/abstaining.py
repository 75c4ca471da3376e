"""How a client abstains: by the same message for every reason. Only its own log has the reason."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baffle.core.messages import Abstention, encode, first_number
from baffle.errors import one_line

Tell = Callable[[str], None]  # a log: takes one line
REPEAT_SECONDS = 600.0  # a repeated reason is logged again after this time
MOST_REASONS = 100  # how many reasons are remembered. A lying server can cause any number of them.
MOST_CHARACTERS = 2_000  # a reason is cut to this length, because it may quote a message from the server


def abstention(request: bytes) -> bytes:
    """The reply of a client that does not do what it was asked. It follows from the request alone: a reason could say
    something about the client's samples or files, and a lying server would ask until it does."""
    return encode(Abstention(first_number(request)))


@dataclass(frozen=True)
class RateLimitedLog:
    """Logs the same words, apart from the numbers in them, at most once in ten minutes: what fails in one round usually
    fails in all that follow. `clock` gives seconds."""

    tell: Tell
    clock: Callable[[], float] = time.monotonic
    _told: dict[str, float] = field(default_factory=dict, repr=False)  # words without numbers → when they were told

    def __call__(self, words: str) -> None:
        words = one_line(words, MOST_CHARACTERS)
        kind, now = re.sub(r"\d+", "#", words), self.clock()
        if now - self._told.get(kind, -math.inf) < REPEAT_SECONDS:
            return
        self._told.pop(kind, None)
        self._told[kind] = now
        if len(self._told) > MOST_REASONS:
            del self._told[next(iter(self._told))]
        self.tell(words)
