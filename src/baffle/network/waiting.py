"""What a server says while its run waits."""

import time
from collections.abc import Callable

AGAIN = 60.0
"""Seconds until it is said again that clients refuse: whoever looks at the log later must see it, too."""


class Waiting:
    """Tells what a run waits for, once, and how many clients refuse to take part, when that changes and now and then:
    otherwise a server that everybody refuses would wait for ever without a word."""

    def __init__(self, tell: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._now = tell, now
        self._why = ""
        self._counts, self._told = (0, 0), -AGAIN

    def say(self, why: str, connected: int, refusing: int) -> None:
        """The run waits for this, with so many clients connected and so many of them refusing."""
        if why != self._why:
            self._tell(f"{why}: waiting")
        self._why = why
        again = self._now() - self._told >= AGAIN
        if refusing and (again or (connected, refusing) != self._counts):
            self._tell(
                f"{connected} clients are connected, and {refusing} of them refuse to take part: each client's own log "
                "says why"
            )
            self._told = self._now()
        self._counts = connected, refusing

    def end(self) -> None:
        """The run goes on."""
        self._why = ""
