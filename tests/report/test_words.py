"""How numbers are shown."""

import pytest

from baffle.report.words import duration, is_share, measured, metric_name, size


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (2e9, "2.0 GB"), (5e12, "5000.0 GB")],
)
def test_sizes(count: float, expected: str) -> None:
    assert size(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (0.4, "0 s"), (59.6, "1 min 0 s"), (61, "1 min 1 s"), (3599.9, "1 h 0 min"), (7325, "2 h 2 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_metrics_are_named_and_shown_as_people_say_them() -> None:
    assert metric_name("test_accuracy") == "test accuracy"
    assert metric_name("test_top5") == "top-5 accuracy"
    assert (measured("test_accuracy", 0.5), measured("test_mse", 0.5)) == ("50.00%", "0.5")
    assert measured("test_r2", float("nan")) == measured("test_r2", None) == "–"
    assert is_share("test_accuracy_last")
    assert not is_share("test_mae")
