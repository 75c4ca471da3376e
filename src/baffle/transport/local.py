"""A transport to clients in this process, on worker threads."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

Answer = Callable[[int, bytes], bytes]
"""Client number and request → reply."""


class LocalTransport:
    """Calls `answer` for each client that is asked, `workers` of them at a time. Replies come in the order of the
    requests. `on_reply` is called after each reply with the number of replies so far and of requests."""

    def __init__(
        self, answer: Answer, workers: int, on_reply: Callable[[int, int], None] = lambda _done, _of: None
    ) -> None:
        self._answer = answer
        self._on_reply = on_reply
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="client")

    def exchange(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        replies: dict[int, bytes] = {}
        for reply, client in zip(
            self._pool.map(self._answer, requests.keys(), requests.values()), requests, strict=True
        ):
            replies[client] = reply
            self._on_reply(len(replies), len(requests))
        return replies

    def __enter__(self) -> "LocalTransport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
