"""Measures how long work takes, by a clock that is handed in."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

Clock = Callable[[], float]  # seconds since some moment
TURNS, MOST_TURNS = 3, 10
"""How often the same work is timed: more often if it is quick. Other work on the machine can only add to a turn, so the
least one counts."""


@dataclass(frozen=True)
class Stopwatch:
    """Times work, in CPU seconds of this process unless another clock is handed in."""

    clock: Clock = time.process_time

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one turn."""
        began = self.clock()
        work()
        return self.clock() - began

    def least(self, work: Callable[[], object], budget: float = 0.0) -> float:
        """Seconds of the quickest turn, of more turns if they fit into `budget` seconds."""
        turns = [self.seconds(work) for _ in range(TURNS)]
        while len(turns) < MOST_TURNS and sum(turns) < budget:
            turns.append(self.seconds(work))
        return min(turns)

    def seconds_each(self, work: Callable[[int], object], most: int, budget: float) -> float:
        """Seconds of one item, if `work` does a number of items together: as many as fit into about `budget` seconds,
        and at most `most`. The first call does not count, because it allocates memory that later calls use."""
        work(1)
        count = 1
        while count < most and self.seconds(partial(work, count)) < budget / TURNS / 2:
            count = min(2 * count, most)
        return self.least(partial(work, count), budget / 2) / count
