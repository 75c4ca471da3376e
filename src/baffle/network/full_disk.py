"""A server whose disk is full waits for room, and goes on where it was: no round is lost, and none is played twice."""

import time
from collections.abc import Callable
from typing import TypeVar

from baffle.errors import FullDiskError

PAUSE = 5.0
"""Seconds between two attempts to write."""

T = TypeVar("T")


class WaitForRoom:
    """Makes a write again and again while there is no room for it. It tells so once, and again when there is room.
    Clients stay connected meanwhile."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def __call__(self, write: Callable[[], T]) -> T:
        waiting = False
        while True:
            try:
                result = write()
            except FullDiskError as fault:
                if not waiting:
                    self._tell(f"{fault.problem}; the run waits until there is room")
                waiting = True
                time.sleep(PAUSE)
                continue
            if waiting:
                self._tell("there is room on the disk again; the run goes on")
            return result
