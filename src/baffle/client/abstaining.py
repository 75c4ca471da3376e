"""How a client abstains: with one message for every reason. Its own log has the reason."""

import math
import re
import time
from collections.abc import Callable

from baffle.core.messages import Abstention, encode, first_number
from baffle.errors import one_line

Tell = Callable[[str], None]

REPEAT_SECONDS = 600.0
"""A reason that keeps coming up is told again after this time."""

MOST_REASONS = 100
"""How many reasons are remembered: a server that lies can cause any number of them."""

MOST_CHARACTERS = 2_000
"""A reason is cut to this length: it may quote what a server sent."""


def abstention(request: bytes) -> bytes:
    """The answer of a client that will not or cannot do what it was asked. It follows from the request alone: a reason
    could say something about the client's samples or files, and a server that lies would ask until it does."""
    return encode(Abstention(first_number(request)))


class Sparingly:
    """Tells the same words, whatever numbers are in them, at most once in ten minutes: what fails in one round usually
    fails in all that follow."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told: dict[str, float] = {}

    def __call__(self, words: str) -> None:
        words = one_line(words, MOST_CHARACTERS)
        kind, now = re.sub(r"\d+", "#", words), time.monotonic()
        if now - self._told.get(kind, -math.inf) < REPEAT_SECONDS:
            return
        self._told.pop(kind, None)
        self._told[kind] = now
        if len(self._told) > MOST_REASONS:
            del self._told[next(iter(self._told))]
        self._tell(words)
