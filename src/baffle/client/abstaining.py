"""How a client abstains: what the server may know of the reason, and what only the client's own log tells."""

import math
import re
import time
from collections.abc import Callable

from baffle.core.messages import Abstention
from baffle.errors import MessageError, one_line

Tell = Callable[[str], None]

UNABLE = "this client cannot take part at the moment; its own log says why"
"""All that a server learns of a reason that lies with the client."""

REPEAT_SECONDS = 600.0
"""A reason that keeps coming up is told again after this time."""

MOST_REASONS = 100
"""How many reasons are remembered: a server that lies can cause any number of them."""


def abstention(round_number: int, fault: Exception) -> Abstention:
    """The answer of a client that cannot do what it was asked. A MessageError is about what the server asked, so the
    server reads it. Any other error may name files of the client's machine or say what they hold."""
    return Abstention(round_number, one_line(str(fault)) if isinstance(fault, MessageError) else UNABLE)


class Sparingly:
    """Tells the same words, whatever numbers are in them, at most once in ten minutes: what fails in one round usually
    fails in all that follow."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told: dict[str, float] = {}

    def __call__(self, words: str) -> None:
        kind, now = re.sub(r"\d+", "#", words), time.monotonic()
        if now - self._told.get(kind, -math.inf) < REPEAT_SECONDS:
            return
        self._told.pop(kind, None)
        self._told[kind] = now
        if len(self._told) > MOST_REASONS:
            del self._told[next(iter(self._told))]
        self._tell(words)
