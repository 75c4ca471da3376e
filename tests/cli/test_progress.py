"""Progress as a person sees it: a live line, or lines in a log."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from baffle.cli import progress
from baffle.core.ring import LOSS_MAX
from baffle.report.words import CUT_OFF
from baffle.server.recorder import Progress

PROGRESS = Progress(12, 50, 1.2345, 0.876, 4_200, 1_250_000, seconds_left=75.0)


def test_a_line_shows_round_loss_accuracy_bytes_and_time_left() -> None:
    line = progress.line(PROGRESS)
    for part in ("round 12/50", "loss 1.234", "accuracy 87.6%", "up 4.2 kB", "down 1.2 MB", "1 min 15 s left"):
        assert part in line


def test_a_line_shows_dropouts_only_if_there_were_any() -> None:
    assert "dropped" not in progress.line(PROGRESS)
    assert "dropped 1,234" in progress.line(replace(PROGRESS, dropouts=1_234))


def test_a_loss_that_the_ring_cut_off_is_not_shown_as_a_number() -> None:
    assert "loss 64 or more " in progress.line(replace(PROGRESS, loss=LOSS_MAX))
    assert "loss 63.900 " in progress.line(replace(PROGRESS, loss=63.9))
    assert CUT_OFF == LOSS_MAX


def test_a_line_before_anything_is_known() -> None:
    line = progress.line(Progress(0.5, 50))
    assert "round 0.5/50" in line
    assert line.count("–") == 3


def test_on_a_terminal_the_line_is_live() -> None:
    screen = io.StringIO()
    with progress.watching(Console(file=screen, force_terminal=True, width=140), "probing") as watch:
        watch(PROGRESS)
    shown = screen.getvalue()
    assert "probing" in shown
    assert "round 12/50" in shown


def _logged(rounds: int, seconds: float, monkeypatch: pytest.MonkeyPatch, done: Sequence[float] = ()) -> list[str]:
    """The lines of a run whose rounds take so many seconds each, where there is no terminal."""
    screen, now = io.StringIO(), 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with progress.watching(Console(file=screen, width=40), "probing") as watch:
        for place in done or range(1, rounds + 1):
            now = place * seconds
            watch(replace(PROGRESS, rounds_done=place, rounds=rounds))
    return re.findall(r"round (\S+)/", screen.getvalue())


@pytest.mark.parametrize(
    ("rounds", "seconds", "shown"),
    [
        (200, 0.07, ["20", "40", "60", "80", "100", "120", "140", "160", "180", "200"]),
        (6, 0.01, ["6"]),
        (7, 60.0, ["1", "2", "3", "4", "5", "6", "7"]),
        (45, 3.0, ["5", "10", "15", "20", "25", "30", "35", "40", "45"]),
        (333, 0.3, ["50", "100", "150", "200", "250", "300", "333"]),
    ],
)
def test_without_a_terminal_there_are_plain_lines_at_whole_rounds(
    rounds: int, seconds: float, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _logged(rounds, seconds, monkeypatch) == shown


def test_a_part_of_a_round_has_no_line_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _logged(3, 100.0, monkeypatch, [0.25, 0.5, 1, 1.5, 2, 2.9, 3]) == ["1", "2", "3"]


@given(st.integers(1, 10**6), st.floats(1e-6, 1e4))
def test_steps_are_round_numbers(rounds: int, seconds: float) -> None:
    assert re.fullmatch("[125]0*", str(progress.step_of(rounds, seconds)))


@given(
    st.integers(0, 10**7),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.integers(0, 10**13),
    st.sampled_from([60, 80, 100, 140]),
)
def test_a_live_line_fits_its_terminal(done: int, loss: float, left: float, count: int, width: int) -> None:
    shown = Progress(done, 10**7, loss, 0.5, count, count, dropouts=count, seconds_left=left)
    for label in ("probing", "backpropagation"):
        screen = io.StringIO()
        with progress.watching(
            Console(file=screen, force_terminal=True, width=width, color_system=None), label
        ) as watch:
            watch(shown)
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").splitlines()
        assert max(map(len, lines)) <= width
        assert len({line.strip() for line in lines if "round" in line}) == 1


def test_steps_are_shown_live_or_line_by_line() -> None:
    live, plain = io.StringIO(), io.StringIO()
    for console in (Console(file=live, force_terminal=True, width=140), Console(file=plain, width=10)):
        with progress.telling(console, "table4") as tell:
            tell("LeNet, 32 × 32")
            tell("WRN-10-2, 32 × 32")
    assert "WRN-10-2" in live.getvalue()
    assert plain.getvalue().splitlines() == ["table4  LeNet, 32 × 32", "table4  WRN-10-2, 32 × 32"]


@pytest.mark.parametrize("label", ["probing", "backpropagation"])
def test_in_80_columns_nothing_is_cut_in_the_middle(label: str) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    with progress.watching(console, label) as watch:
        watch(replace(PROGRESS, rounds_done=120, rounds=200, dropouts=1_234))
    shown = [line for line in re.split(r"[\r\n]", screen.getvalue()) if "round 120/200" in line][-1]
    assert "…" not in shown
    assert "accuracy 87.6%" in shown
    assert "1 min 15 s left" in shown
