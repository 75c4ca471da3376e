"""What a person sees during and after a run."""

import io
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from baffle.cli import show
from baffle.plan import Plan
from baffle.simulation import simulate


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
    screen.write(show.aligned(show.summary_rows(summary, Path("my run"))))
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
    screen.write(show.aligned(show.summary_rows(summary, Path("my run"))))
    assert "not measured: no test set" in screen.getvalue()


def test_values_stand_below_one_another() -> None:
    lines = show.aligned({"a": "1", "longer name": "2"}).splitlines()
    assert lines == ["  a            1", "  longer name  2"]


def test_the_seconds_say_what_they_are() -> None:
    assert "3 s in all\n" in _table()
    more = {"seconds": 25.2, "evaluation_seconds": 1.0, "bookkeeping_seconds": 0.1, "estimator": "probe"}
    assert "25 s in all, 24 s of it probing" in _table(**more)
    assert "of it training" in _table(**more | {"estimator": "backprop"})


def test_refusals_are_counted_with_the_command_that_shows_them() -> None:
    assert "2 messages; to read them: baffle status 'my run'" in _table(refusals=2)
