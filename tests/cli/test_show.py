"""What a person sees during and after a run."""

import io
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baffle.cli import show
from baffle.plan import Plan
from baffle.server.recorder import Progress
from baffle.simulation import simulate

PROGRESS = Progress(12, 50, 1.2345, 0.876, 4_200, 1_250_000, seconds_left=75.0)


def test_a_line_shows_round_loss_accuracy_bytes_and_time_left() -> None:
    line = show.line(PROGRESS)
    for part in ("round 12/50", "loss 1.234", "accuracy 87.6%", "up 4.2 kB", "down 1.2 MB", "1 min 15 s left"):
        assert part in line


def test_a_line_shows_dropouts_only_if_there_were_any() -> None:
    assert "dropped" not in show.line(PROGRESS)
    assert "dropped 1,234" in show.line(replace(PROGRESS, dropouts=1_234))


def test_a_line_before_anything_is_known() -> None:
    line = show.line(Progress(0.5, 50))
    assert "round 0.5/50" in line
    assert line.count("–") == 3


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (2e9, "2.0 GB"), (5e12, "5000.0 GB")],
)
def test_sizes(count: float, expected: str) -> None:
    assert show.size(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (0.4, "0 s"), (59.6, "1 min 0 s"), (61, "1 min 1 s"), (3599.9, "1 h 0 min"), (7325, "2 h 2 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert show.duration(seconds) == expected


def test_on_a_terminal_the_line_is_live() -> None:
    screen = io.StringIO()
    with show.watching(Console(file=screen, force_terminal=True, width=140), "probing") as watch:
        watch(PROGRESS)
    shown = screen.getvalue()
    assert "probing" in shown
    assert "round 12/50" in shown


def test_without_a_terminal_there_is_a_plain_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    with show.watching(Console(file=screen, width=40), "probing") as watch:
        watch(PROGRESS)
        assert screen.getvalue() == ""
        monkeypatch.setattr(show, "EVERY", 0.0)
        watch(PROGRESS)
        monkeypatch.setattr(show, "EVERY", 3600.0)
        watch(PROGRESS)
        watch(Progress(50, 50))
    first, last = screen.getvalue().splitlines()
    assert first == f"probing  {show.line(PROGRESS)}"
    assert last.startswith("probing  round 50/50")


def test_steps_are_shown_live_or_line_by_line() -> None:
    live, plain = io.StringIO(), io.StringIO()
    for console in (Console(file=live, force_terminal=True, width=140), Console(file=plain, width=10)):
        with show.telling(console, "table4") as tell:
            tell("LeNet, 32 × 32")
            tell("WRN-10-2, 32 × 32")
    assert "WRN-10-2" in live.getvalue()
    assert plain.getvalue().splitlines() == ["table4  LeNet, 32 × 32", "table4  WRN-10-2, 32 × 32"]


def _table(**more: Any) -> str:
    summary = {
        "test_accuracy": 0.9,
        "test_accuracy_last": 0.8,
        "rounds": 40,
        "seconds": 3.0,
        "skipped_rounds": 0,
        "forwards": 1234,
        "uplink_bytes_per_client_round": 60,
        "downlink_bytes_per_client_round": 208,
        "n_weights": 650,
        "clipped": 0,
        "dropouts": 0,
        "refusals": 0,
        "supports": "dense",
        "secure": "off",
        "peak_rss_mb": 300.0,
        "weights_sha256": "ab" * 32,
    } | more
    screen = io.StringIO()
    Console(file=screen, width=100).print(show.summary_table(summary))
    return screen.getvalue()


def test_the_table_has_rows_for_clipped_skipped_and_dropped_only_if_there_were_any() -> None:
    assert "clipped" not in _table()
    assert "skipped" not in _table()
    assert "dropouts" not in _table()
    shown = _table(clipped=7, skipped_rounds=2, dropouts=1_234, refusals=56)
    assert "1,234 replies missing" in shown
    assert "7 values" in shown
    assert "2 skipped" in shown
    assert "56 messages" in shown


@pytest.mark.parametrize("mode", ["on", "off"])
def test_the_table_says_whether_the_sum_was_secure(mode: str) -> None:
    (row,) = [line for line in _table(secure=mode).splitlines() if "secure sum" in line]
    assert mode in row.split()


def test_the_table_says_that_structured_probes_are_parts_of_forward_passes() -> None:
    assert "part that its units change" in _table(supports="units")
    assert "part" not in _table()


def test_the_table_shows_top_5_and_domains_if_they_were_measured() -> None:
    assert "top-5" not in _table()
    assert "domains" not in _table()
    shown = _table(
        test_top5=0.9876, test_domains={"photo": {"accuracy": 0.5, "top5": 1.0}, "sketch": {"accuracy": 0.25}}
    )
    assert "98.76%" in shown
    assert "photo 50.00%, sketch 25.00%" in shown


def test_a_run_without_a_test_set_shows_that_its_accuracy_was_not_measured(
    tiny: Callable[..., Plan], tmp_path: Path
) -> None:
    (tmp_path / "untested.py").write_text(
        "import numpy as np\nfrom baffle import Dataset, Source\n"
        "def data():\n"
        "    samples = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32)\n"
        "    return Source(Dataset(samples, np.arange(60) % 10, lambda x: x), None, classes=10)\n"
    )
    notes = list[str]()
    with chdir(tmp_path):
        summary = simulate(tiny('task.data="untested:data"'), tmp_path / "run", warn=notes.append)
    assert any(note.startswith("accuracy is not measured: the data set has no test samples") for note in notes)
    screen = io.StringIO()
    Console(file=screen, width=100).print(show.summary_table(summary))
    assert "not measured: no test set" in screen.getvalue()
