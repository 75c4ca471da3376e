"""What a server needs of its machine: room on the disk, and open files, of which each connection is one."""

import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from baffle.client.abstaining import Tell
from baffle.errors import FullDiskError
from baffle.network.clock import Clock
from baffle.network.link.door import KEPT, places

PAUSE = 5.0  # seconds between two attempts to write to a full disk
SPARE = 64  # open files that a server needs besides connections: journal, log, libraries
T = TypeVar("T")


@dataclass(frozen=True)
class WaitForRoom:
    """Makes a write again and again while there is no room for it, so no round is lost and none is played twice. It
    tells so once, and again when there is room. Clients stay connected meanwhile."""

    tell: Tell
    clock: Clock

    def __call__(self, write: Callable[[], T]) -> T:
        waiting = False
        while True:
            try:
                result = write()
            except FullDiskError as fault:
                if not waiting:
                    self.tell(f"{fault.problem}; the run waits until there is room")
                waiting = True
                self.clock.sleep(PAUSE)
                continue
            if waiting:
                self.tell("there is room on the disk again; the run goes on")
            return result


def require_open_files(clients: int, tell: Tell) -> None:
    """Raise this process's limit on open files as far as so many clients need and the system allows. If that is not
    far enough, tell how many clients fit and what to do: perhaps fewer come."""
    needed = files_for(clients)
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not _allows(limit, needed):
        reachable = needed if _allows(hard, needed) else hard
        with suppress(OSError, ValueError):  # macOS may say that there is no hard limit, and have one
            resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
            limit = reachable
    if not _allows(limit, needed):
        fit = max(0, (8 * (limit - files_for(0)) + 7) // 9)
        tell(
            f"this server may have {limit} files open, which is enough for {fit} clients: "
            f"{clients} clients need {needed}; start it after `ulimit -n {needed}` as root, "
            f"or with LimitNOFILE={needed} in its systemd unit"
        )


def files_for(clients: int) -> int:
    """How many open files a server of so many clients needs: for them, for strangers that knock, and for its run."""
    return clients + places(clients) + KEPT + SPARE


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
