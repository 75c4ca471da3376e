"""The transport to clients in this process: order, parallelism, and a client that fails."""

import threading
import time

import pytest

from baffle.transport.local import LocalTransport

REQUESTS = {5: b"e", 1: b"a", 9: b"i"}


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_replies_come_in_the_order_of_requests_whichever_client_is_first(workers: int) -> None:
    def answer(client: int, message: bytes) -> bytes:
        time.sleep(0.02 if client == 5 else 0)
        return message * client

    progress: list[tuple[int, int]] = []
    with LocalTransport(answer, workers, lambda done, of: progress.append((done, of))) as transport:
        replies = transport.exchange(REQUESTS)
        assert transport.exchange({}) == {}
    assert list(replies.items()) == [(5, b"eeeee"), (1, b"a"), (9, b"iiiiiiiii")]
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_as_many_clients_work_at_once_as_there_are_workers() -> None:
    both = threading.Barrier(2, timeout=10)

    def answer(_client: int, message: bytes) -> bytes:
        both.wait()
        return message

    with LocalTransport(answer, 2) as transport:
        assert transport.exchange({0: b"x", 1: b"y", 2: b"z", 3: b"w"}) == {0: b"x", 1: b"y", 2: b"z", 3: b"w"}


def test_a_single_worker_takes_one_client_at_a_time() -> None:
    busy = threading.Lock()

    def answer(_client: int, message: bytes) -> bytes:
        assert busy.acquire(blocking=False)
        time.sleep(0.005)
        busy.release()
        return message

    with LocalTransport(answer, 1) as transport:
        assert transport.exchange(REQUESTS) == REQUESTS


def test_a_fault_in_a_client_is_not_swallowed() -> None:
    def answer(client: int, _message: bytes) -> bytes:
        raise ZeroDivisionError(client)

    with pytest.raises(ZeroDivisionError), LocalTransport(answer, 2) as transport:
        transport.exchange(REQUESTS)


def test_leaving_ends_the_workers() -> None:
    with LocalTransport(lambda _, message: message, 3) as transport:
        transport.exchange(REQUESTS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("client")]
