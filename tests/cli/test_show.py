"""What a person sees during and after a run, and of a partition."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from baffle.cli import show
from baffle.cli.show import MOST_LINES, SHOWN, partition_view, spark
from baffle.core.ring import LOSS_MAX
from baffle.data.partition import Holding, holdings
from baffle.data.sources import Dataset, Source
from baffle.report.words import CUT_OFF
from baffle.server.recorder import Progress
from tests.support.command_line import Cli

PARTS = {"evaluation_seconds": 1.0, "bookkeeping_seconds": 0.1}


def table(**more: Any) -> str:
    summary = {
        **{"test_accuracy": 0.9, "test_accuracy_last": 0.8, "rounds": 40, "seconds": 3.0, "skipped_rounds": 0},
        **{"forwards": 1234, "uplink_bytes_per_client_round": 60, "downlink_bytes_per_client_round": 208},
        **{"n_weights": 650, "clipped": 0, "dropouts": 0, "refusals": 0, "supports": "dense", "secure": "off"},
        **{"peak_rss_mb": 300.0, "weights_sha256": "ab" * 32},
    }
    return show.aligned(show.summary_rows(summary | more, Path("my run")))


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"clipped": 7}, "7 values"),
        ({"skipped_rounds": 2}, "2 skipped"),
        ({"dropouts": 1_234}, "1,234 replies missing"),
        ({"refusals": 2}, "2 messages; to read them: baffle status 'my run'"),
        ({"secure": "on"}, "secure sum      on"),
        ({"supports": "units"}, "part that its units change"),
        ({"test_top5": 0.9876}, "98.76%"),
        ({"test_domains": {"photo": {"accuracy": 0.5, "top5": 1.0}, "sketch": {"accuracy": 0.25}}}, "photo 50.00%, sk"),
        ({"seconds": 25.2, **PARTS, "estimator": "probe"}, "25 s in all, 24 s of it probing"),
        ({"seconds": 25.2, **PARTS, "estimator": "backprop"}, "of it training"),
    ],
)
def test_the_table_shows_what_there_was_and_nothing_else(more: dict[str, Any], shown: str) -> None:
    assert shown in table(**more)
    assert shown not in table()


def test_values_stand_below_one_another() -> None:
    assert show.aligned({"a": "1", "longer name": "2"}).splitlines() == ["  a            1", "  longer name  2"]
    assert "secure sum      off\n" in table()
    assert "3 s in all\n" in table()
    assert "test rouge      not measured: no test set" in table(metrics=["rouge"])


PROGRESS = Progress(12, 50, 1.2345, 0.876, 4_200, 1_250_000, seconds_left=75.0)


def test_a_line_shows_round_loss_accuracy_bytes_and_time_left() -> None:
    line = show.progress_line(PROGRESS)
    for part in ("round 12/50", "loss 1.234", "accuracy 87.6%", "up 4.2 kB", "down 1.2 MB", "1 min 15 s left"):
        assert part in line
    assert "dropped" not in line
    assert "dropped 1,234" in show.progress_line(replace(PROGRESS, dropouts=1_234))
    unknown = show.progress_line(Progress(0.5, 50))
    assert "round 0.5/50" in unknown
    assert unknown.count("–") == 3


def test_a_loss_that_the_ring_cut_off_is_not_shown_as_a_number() -> None:
    assert "loss 64 or more " in show.progress_line(replace(PROGRESS, loss=LOSS_MAX))
    assert "loss 63.900 " in show.progress_line(replace(PROGRESS, loss=63.9))
    assert CUT_OFF == LOSS_MAX


def logged(rounds: int, seconds: float, done: Sequence[float] = ()) -> list[str]:
    """The rounds that have a line where there is no terminal, if each takes this many seconds."""
    screen, time = io.StringIO(), 0.0
    with show.watching(Console(file=screen, width=40), "probing", lambda: time) as watch:
        for place in done or range(1, rounds + 1):
            time = place * seconds
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
    rounds: int, seconds: float, shown: list[str]
) -> None:
    assert logged(rounds, seconds) == shown
    assert logged(3, 5.0, [0.25, 0.5, 1, 1.5, 2, 2.9, 3]) == ["1", "2", "3"]  # none at a part of a short round
    assert logged(2, 100.0, [0.05, 0.1, 0.15, 0.5, 1, 1.05, 1.1]) == ["0.1", "0.5", "1", "1.1"]


@pytest.mark.parametrize("forced", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_colours_that_are_asked_for_animate_no_file(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: str
) -> None:
    monkeypatch.setenv(forced, "1")
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--set", "rounds=2")
    assert "round 2/2" in done.stdout
    assert not re.search(r"\r|\x1b\[\?25l|\x1b\[\d*[AK]", done.stdout + done.stderr)  # moves, erases, hides the cursor


@given(st.integers(1, 10**6), st.floats(1e-6, 1e4))
def test_steps_are_round_numbers(rounds: int, seconds: float) -> None:
    assert re.fullmatch("[125]0*", str(show.step_of(rounds, seconds)))


def live(shown: Progress, width: int, label: str) -> list[str]:
    """The lines that a terminal of this width shows."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    with show.watching(console, label) as watch:
        watch(shown)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).replace("\r", "\n").splitlines()


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
        lines = live(shown, width, label)
        assert max(map(len, lines)) <= width
        assert len({line.strip() for line in lines if "round" in line}) == 1


@pytest.mark.parametrize("label", ["probing", "backpropagation"])
def test_in_80_columns_nothing_is_cut_in_the_middle(label: str) -> None:
    lines = live(replace(PROGRESS, rounds_done=120, rounds=200, dropouts=1_234), 80, label)
    shown = [line for line in lines if "round 120/200" in line][-1]
    assert label in shown
    assert "…" not in shown
    assert "accuracy 87.6%" in shown
    assert "1 min 15 s left" in shown


def test_steps_are_shown_live_or_line_by_line() -> None:
    live, plain = io.StringIO(), io.StringIO()
    for console in (Console(file=live, force_terminal=True, width=140), Console(file=plain, width=10)):
        with show.telling(console, "table4") as tell:
            tell("LeNet, 32 × 32")
            tell("WRN-10-2, 32 × 32")
    assert "WRN-10-2" in live.getvalue()
    assert plain.getvalue().splitlines() == ["table4  LeNet, 32 × 32", "table4  WRN-10-2, 32 × 32"]


def _drawn(held: list[Holding]) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=120).print(partition_view(held))
    return screen.getvalue().splitlines()


def _source() -> Source:
    labels = np.array([0, 0, 1, 2, 2, 2])
    domain_of = np.array([0, 0, 0, 1, 1, 1])
    writer_of = np.array([5, 5, 5, 5, 9, 9])
    data = Dataset(np.zeros((6, 1)), labels, lambda x: x, domain_of=domain_of, writer_of=writer_of)
    return Source(data, data, 4, ("photo", "sketch"))


def test_a_client_has_the_domain_and_writer_that_all_its_samples_share() -> None:
    first, second, mixed = holdings(_source(), [np.array([0, 2]), np.array([4, 5, 3]), np.array([1, 4])])
    assert first == Holding(0, 2, [1, 1, 0, 0], "photo", 5)
    assert (second.classes, second.domain, second.writer) == ([0, 0, 3, 0], "sketch", None)
    assert (mixed.classes, mixed.domain, mixed.writer, mixed.group) == ([1, 0, 1, 0], None, None, "")
    assert Holding(0, 1, [1], None, 7).group == "writer 7"


@pytest.mark.parametrize(
    ("counts", "expected"), [([0, 1, 8], "·▁█"), ([8, 7, 4, 1], "█▇▄▁"), ([1, 1000], "▁█"), ([5], "█")]
)
def test_even_one_sample_of_a_class_is_visible(counts: list[int], expected: str) -> None:
    assert spark(counts) == expected


def test_domains_are_summed_up() -> None:
    shown = _drawn(holdings(_source(), [np.array([0]), np.array([1, 2]), np.array([3, 4, 5])]))
    assert any(line.split()[:1] == ["photo"] and "2 clients, 3 samples" in line for line in shown)
    assert shown[-1].split()[:3] == ["2", "sketch", "3"]
    assert "100% are class 2" in shown[-1]


@pytest.mark.parametrize(("clients", "lines"), [(MOST_LINES, MOST_LINES), (MOST_LINES + 1, SHOWN), (5000, SHOWN)])
def test_of_many_clients_a_selection_is_shown(clients: int, lines: int) -> None:
    shown = _drawn([Holding(i, 1 + i, [1 + i]) for i in reversed(range(clients))])
    body = shown[next(i for i, line in enumerate(shown) if line.split()[:2] == ["client", "samples"]) + 1 :]
    assert len(body) == lines
    assert any("of" in line and "from the smallest" in line for line in shown) == (lines == SHOWN)
    if lines == SHOWN:
        assert body[0].split()[0] == "0"
        assert body[-1].split()[0] == str(clients - 1)
