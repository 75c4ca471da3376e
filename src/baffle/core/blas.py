"""NumPy's BLAS on one thread. More threads wait for each other between small products, many times slower; whoever wants
several threads gives each of them products of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

from threadpoolctl import ThreadpoolController, threadpool_limits


class _Limit:
    """One limit that threads share: the first to come sets it, and the last to leave lifts it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._controller = ThreadpoolController()  # finding the libraries takes longer than a small product
        self._users = 0
        self._limits: threadpool_limits | None = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._limits = self._controller.limit(limits=1, user_api="blas")

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._limits is not None:
                self._limits.restore_original_limits()


@cache
def _shared_limit() -> _Limit:
    return _Limit()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run NumPy's BLAS on one thread, in this and all other threads of the process."""
    limit = _shared_limit()
    limit.enter()
    try:
        yield
    finally:
        limit.leave()
