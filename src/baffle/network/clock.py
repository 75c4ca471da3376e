"""The clock of a server or client. It is handed in, so that a test can let an hour pass at once."""

import time
from threading import Event


class Clock:
    """Seconds since some moment, and pauses."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: Event, seconds: float) -> bool:
        return event.wait(seconds)
