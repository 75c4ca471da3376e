"""How numbers and names are shown to people, on pages and in a terminal."""

import math

SHARES = ("accuracy", "top5")
"""Metrics that are shares of a whole, and shown in percent."""

CUT_OFF = 64.0
"""`LOSS_MAX` of the ring, which is not imported here because NumPy would be: no displayed loss can be larger."""


def shown_loss(loss: float, digits: int = 3) -> str:
    """A loss; every client's is cut off at 64 before it is sent, so that larger ones cannot be told apart."""
    return f"{loss:.{digits}f}" if loss < CUT_OFF else f"{CUT_OFF:.0f} or more"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def is_share(metric: str) -> bool:
    """Whether a metric is a share of samples: 0.9 is 90%."""
    return metric.removesuffix("_last").removeprefix("test_") in SHARES


def metric_name(metric: str) -> str:
    """`test_accuracy` as people say it."""
    known = {"test_top5": "top-5 accuracy"}
    return known.get(metric, metric.replace("_", " "))


def measured(metric: str, value: float | None) -> str:
    """The value of a metric."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.2%}" if is_share(metric) else f"{value:,.4g}"


def ranges(numbers: list[int], most: int = 8) -> str:
    """Numbers in few words, those after the first few ranges as a count: 1–4, 7, and 12 more."""
    ordered, parts = sorted(set(numbers)), list[list[int]]()
    for number in ordered:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = [f"{part[0]:,}" if len(part) == 1 else f"{part[0]:,}–{part[-1]:,}" for part in parts[:most]]
    left = sum(map(len, parts[most:]))
    return ", ".join([*shown, f"and {left:,} more"] if left else shown)
