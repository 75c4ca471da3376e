"""How many files a server may have open. The connection of each client is one of them."""

import resource
from collections.abc import Callable

from baffle.network.link.door import places

SPARE = 64
"""Open files that a server needs besides connections: journal, log, libraries."""


def require_open_files(clients: int, tell: Callable[[str], None]) -> None:
    """Raise this process's limit on open files as far as so many clients need and the system allows.

    If that is not far enough, tell how many clients fit and what to do. The server may still run: perhaps fewer come.
    """
    needed = files_for(clients)
    limit = _raised(needed)
    if not _allows(limit, needed):
        tell(
            f"this server may have {limit} files open, which is enough for {_clients_with(limit)} clients: "
            f"{clients} clients need {needed}; start it after `ulimit -n {needed}` as root, "
            f"or with LimitNOFILE={needed} in its systemd unit"
        )


def files_for(clients: int) -> int:
    """How many open files a server of so many clients needs: for them, for strangers that knock, and for its run."""
    return clients + places(clients) + SPARE


def _clients_with(limit: int) -> int:
    """How many clients a server with this limit has files for."""
    return max(0, (8 * (limit - files_for(0)) + 7) // 9)


def _raised(needed: int) -> int:
    """The limit, after raising it towards what is needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, needed):
        return soft
    reachable = needed if _allows(hard, needed) else hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    except (OSError, ValueError):  # macOS may say that there is no hard limit, and have one
        return soft
    return reachable


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
