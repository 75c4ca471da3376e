"""NumPy's BLAS on one thread. With more threads, small products spend most of their time waiting. To use several
threads, give each of them products of its own."""

from functools import cache
from threading import Lock

from threadpoolctl import ThreadpoolController, threadpool_limits


class _OneThread:
    """A limit that threads share: the first to enter sets it, and the last to leave lifts it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._controller = ThreadpoolController()  # finding the libraries takes longer than a small product
        self._users = 0
        self._limits: threadpool_limits | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._limits = self._controller.limit(limits=1, user_api="blas")

    def __exit__(self, *_fault: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._limits is not None:
                self._limits.restore_original_limits()


@cache
def one_blas_thread() -> _OneThread:
    """Run NumPy's BLAS on one thread, in this and all other threads of the process, within a `with`."""
    return _OneThread()
