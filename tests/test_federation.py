"""The exchange with clients in this process: order, parallelism, clients that are away, and clients that fail."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baffle.federation import AwayError, Federation, federation

REQUESTS = {5: b"e", 1: b"a", 9: b"i"}

Answer = Callable[[int, bytes], bytes]


@contextmanager
def clients_that(answer: Answer, threads: int, **settings: Any) -> Iterator[Federation]:
    with federation(threads, (cast(Any, None), {}), **settings) as clients:
        for number in range(10):
            clients.clients[number] = cast(Any, SimpleNamespace(answer=partial(answer, number)))
        yield clients
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("client")]


@pytest.mark.parametrize("threads", [1, 8])
def test_replies_come_in_the_order_of_requests_whichever_client_is_first(threads: int) -> None:
    others = threading.Semaphore(0)

    def answer(client: int, message: bytes) -> bytes:
        if client == 5 and threads == 8:
            assert others.acquire(timeout=30)  # the first client answers last
        others.release()
        return message * client

    with clients_that(answer, threads) as clients:
        replies = clients.exchange(REQUESTS)
        assert clients.exchange({}) == {}
    assert list(replies.items()) == [(5, b"eeeee"), (1, b"a"), (9, b"iiiiiiiii")]


def test_clients_answer_at_once_and_one_that_is_away_does_not() -> None:
    together = threading.Barrier(2, timeout=30)

    def answer(client: int, message: bytes) -> bytes:
        together.wait()
        if client == 1:
            raise AwayError
        return message

    with clients_that(answer, 2) as clients:
        assert clients.exchange({1: b"a", 5: b"e"}) == {5: b"e"}


def test_a_fault_in_a_client_is_not_swallowed() -> None:
    def answer(client: int, _message: bytes) -> bytes:
        raise ZeroDivisionError(client)

    with clients_that(answer, 2) as clients, pytest.raises(ZeroDivisionError):
        clients.exchange(REQUESTS)
