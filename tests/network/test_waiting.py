"""What a server says while its run waits: what for, and how many clients refuse."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest

from baffle.network import connected, serve
from baffle.network.policy import Policy
from baffle.network.waiting import AGAIN, Waiting
from baffle.plan import Plan
from tests.support.lines_in_memory import Federation, StoppedError, new_keys


def test_it_is_told_when_it_changes_and_now_and_then() -> None:
    told, clock = list[str](), [0.0]
    waiting = Waiting(told.append, lambda: clock[0])
    for _ in range(5):
        waiting.say("too few", 2, 0)
    assert told == ["too few: waiting"]
    for _ in range(5):
        waiting.say("too few", 3, 2)
    refusal = "3 clients are connected, and 2 of them refuse to take part: each client's own log says why"
    assert told[1:] == [refusal]
    clock[0] += AGAIN / 2
    waiting.say("too few", 3, 2)
    clock[0] += AGAIN / 2
    waiting.say("too few", 3, 2)
    assert told[1:] == [refusal] * 2
    waiting.say("too few", 3, 3)
    assert told[3:] == [refusal.replace("2 of", "3 of")]
    waiting.end()
    waiting.say("too few", 3, 0)
    assert told[4:] == ["too few: waiting"]


@pytest.fixture
def federation(tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    monkeypatch.setattr(serve, "LOOK", 0.001)
    monkeypatch.setattr(connected, "AGAIN", 0.0)
    plan = tiny('secure.mode="on"', "run.deadline_seconds=0.2", "run.evaluate_every=100")
    return Federation(new_keys(tmp_path, 4), tmp_path, plan)


def serve_until_refused(federation: Federation) -> None:
    """Serve until the server has said that clients refuse."""

    def tell(words: str) -> None:
        federation.told.append(words)
        if "refuse to take part" in words and words.startswith("4 clients are connected, and 4"):
            raise StoppedError

    with pytest.raises(StoppedError):
        serve.serve(federation.plan, federation.run, federation.lines(4), federation.roster, tell=tell)


def test_a_server_that_everybody_refuses_says_so(federation: Federation) -> None:
    federation.policy = Policy(floor=4)
    serve_until_refused(federation)


def test_a_server_on_an_older_copy_of_a_run_that_is_over_says_that_clients_refuse(federation: Federation) -> None:
    lines = federation.lines(4)

    def copy(exchange: int) -> None:
        if exchange == 9:
            copytree(federation.run, federation.folder / "older")

    lines.before = copy
    federation.serve(lines)
    federation.run.rename(federation.folder / "newest")
    (federation.folder / "older").rename(federation.run)
    serve_until_refused(federation)
