"""Progress of a run: a live line that fits the terminal, or plain lines at whole rounds where there is none."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from baffle.cli.show import measure
from baffle.report.words import duration, shown_loss, size

if TYPE_CHECKING:
    from baffle.server.recorder import Progress, Watch

SOONEST, LATEST = 1.0, 10.0
"""Seconds between two lines where there is no terminal: rounds are counted together to keep between these."""

LINES = 10
"""So many lines a run has at least, if that does not make them too frequent."""

BAR, SHORT_BAR = 24, 8
"""Characters of a bar, and of one in a terminal of less than a hundred columns."""


@contextmanager
def watching(console: Console, label: str) -> Iterator["Watch"]:
    """A live line of progress on a terminal; otherwise a plain line every few seconds, at whole rounds."""
    if not console.is_terminal:
        yield _lines(console, label)
        return
    width = BAR if console.width >= 100 else SHORT_BAR
    room = console.width - len(label) - width - 3
    columns = (TextColumn(label), BarColumn(bar_width=width), TextColumn("{task.description}"))
    with Bar(*columns, console=console, refresh_per_second=8) as bar:
        task = bar.add_task("starting", total=None)

        def watch(progress: "Progress") -> None:
            bar.update(task, total=progress.rounds, completed=progress.rounds_done, description=line(progress, room))

        yield watch


@contextmanager
def counting(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that counts rounds; nothing if the output is not a terminal."""
    columns = (TextColumn(label), BarColumn(bar_width=BAR), TextColumn("{task.completed}/{task.total} rounds"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def telling(console: Console, label: str) -> Iterator[Callable[[str], None]]:
    """The current step in words: one live line on a terminal; otherwise a plain line for each step."""
    if not console.is_terminal:
        yield lambda step: console.print(f"{label}  {step}", soft_wrap=True, highlight=False)
        return
    with console.status(label) as status:
        yield lambda step: status.update(f"{label}  {step}")


def line(progress: "Progress", room: int = 1000) -> str:
    """Round, loss, the first metric, bytes, dropouts if there were any, time left. What matters least is left out where
    there is no room for it."""
    whole = progress.rounds_done == int(progress.rounds_done)
    done = f"{progress.rounds_done:.{0 if whole else 1}f}"
    known = progress.value is not None
    parts = {
        "round": f"round {done}/{progress.rounds}",
        "loss": _loss(progress),
        "metric": f"{progress.metric} {measure(progress.metric, progress.value, 1) if known else '–'}",
        "up": f"up {size(progress.uplink_bytes)}",
        "down": f"down {size(progress.downlink_bytes)}",
        "dropped": f"dropped {progress.dropouts:,}" if progress.dropouts else "",
        "left": f"{duration(progress.seconds_left)} left" if progress.seconds_left is not None else "– left",
    }
    for name in ("", "down", "up", "dropped", "loss", "left", "metric"):
        parts.pop(name, None)
        shown = "  ".join(part for part in parts.values() if part)
        if len(shown) <= room:
            return shown
    return shown[: max(0, room)]


def _loss(progress: "Progress") -> str:
    """The loss or, in a private run, ε: nobody knows the loss there."""
    if progress.epsilon is not None:
        return f"ε {progress.epsilon:.3g}"
    return f"loss {shown_loss(progress.loss)}" if progress.loss is not None else "loss –"


def _lines(console: Console, label: str) -> "Watch":
    began, before, last = time.monotonic(), -1.0, 0.0

    def watch(progress: "Progress") -> None:
        nonlocal before, last
        done = progress.rounds_done
        before = done - 1 if before < 0 else before  # a run that is resumed does not begin with the first round
        if done != int(done):
            return
        step = step_of(progress.rounds, (time.monotonic() - began) / max(1.0, done - before))
        if (done % step == 0 and done - last >= step) or done == progress.rounds:
            console.print(f"{label}  {line(progress)}", soft_wrap=True)
            last = done

    return watch


def step_of(rounds: int, seconds: float) -> int:
    """After how many rounds of so many seconds there is a line: 1, 2, 5, 10, 20, 50, …"""
    soonest, latest = (_round_number(limit / max(seconds, 1e-6)) for limit in (SOONEST, LATEST))
    return max(soonest, min(latest, _round_number(rounds / LINES)))


def _round_number(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, … that is not below a number."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10
