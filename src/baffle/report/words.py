"""How numbers and names are displayed, on pages and in a terminal."""

import math
from itertools import count

SHARES = ("accuracy", "top5")  # metrics that are shares of a whole, and shown in percent
SCALARS = {  # by a plan's estimator: where the numbers come from that its steps are made of
    **{"probe": "probed", "law": "drawn", "backprop": "exact gradient"},
}
CUT_OFF = 64.0  # the largest loss that is displayed: `LOSS_MAX` of the ring, which would import NumPy


def shown_loss(loss: float, digits: int = 3) -> str:
    """A loss. Clients cap theirs at 64 before they send it, so larger losses all show as 64 or more."""
    return f"{loss:.{digits}f}" if loss < CUT_OFF else f"{CUT_OFF:.0f} or more"


def size(bytes_: float) -> str:
    if bytes_ < 1000:
        return f"{bytes_:.0f} B"
    power = 3 if bytes_ >= 1e9 else 2 if bytes_ >= 1e6 else 1
    return f"{bytes_ / 1000**power:.1f} {('kB', 'MB', 'GB')[power - 1]}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def round_number(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, … that is not below a number."""
    return next(int(digit * 10**power) for power in count() for digit in (1, 2, 5) if digit * 10**power >= least)


def is_share(metric: str) -> bool:
    """Whether a metric is a share of samples: 0.9 is 90%."""
    return metric.removesuffix("_last").removeprefix("test_") in SHARES


def metric_name(metric: str) -> str:
    """The display name of a metric, such as "test accuracy" for `test_accuracy`."""
    return "top-5 accuracy" if metric == "test_top5" else metric.replace("_", " ")


def measured(metric: str, value: float | None) -> str:
    """The value of a metric."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.2%}" if is_share(metric) else f"{value:,.4g}"
