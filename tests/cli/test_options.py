"""How a long-running command is stopped."""

import os
import signal
from threading import Lock

import pytest

from baffle.cli.options import stopped_by_sigterm


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_command_in_order() -> None:
    before, told = signal.getsignal(signal.SIGTERM), list[str]()
    with pytest.raises(SystemExit) as ended, stopped_by_sigterm(told.append, "start it again"):  # noqa: PT012
        try:
            terminate()
            told.append("went on")
        finally:
            terminate()  # somebody is impatient
            told.append("said goodbye")
    assert ended.value.code == 0
    assert told == ["said goodbye", "stopped by SIGTERM; start it again"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_may_come_in_the_middle_of_a_line_of_the_log() -> None:
    lock, told = Lock(), list[str]()

    def tell(words: str) -> None:
        assert lock.acquire(timeout=1), "the line that was interrupted is waited for"
        told.append(words)
        lock.release()

    with pytest.raises(SystemExit), stopped_by_sigterm(tell, "start it again"), lock:
        terminate()
    assert told == ["stopped by SIGTERM; start it again"]


def test_a_command_that_ends_by_itself_says_nothing_of_signals() -> None:
    told = list[str]()
    with stopped_by_sigterm(told.append, "start it again"):
        pass
    assert told == []
