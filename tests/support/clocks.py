"""Clocks for tests of time."""

import time
from dataclasses import dataclass

from baffle.network.clock import Clock


@dataclass
class FakeClock(Clock):
    """Time that passes only in sleeps, which end at once, and in all no more than `longest` seconds."""

    time: float = 0.0
    longest: float = float("inf")

    def __call__(self) -> float:
        return self.time

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        assert self.time < self.longest, "the server waits for ever"


class FastClock(Clock):
    """A clock that goes many times as fast, for servers whose clients run on threads or over real lines."""

    SPEED = 50

    def now(self) -> float:
        return self.SPEED * time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / self.SPEED)
