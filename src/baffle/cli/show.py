"""What a person sees: progress during a run, tables after it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

if TYPE_CHECKING:
    from baffle.server.recorder import Progress, Summary, Watch
    from baffle.task.costs import Costs

EVERY = 5.0
"""Seconds between two lines of progress if the output is not a terminal."""


@contextmanager
def watching(console: Console, label: str) -> Iterator["Watch"]:
    """A live line of progress on a terminal; otherwise a plain line every few seconds."""
    if not console.is_terminal:
        yield _lines(console, label)
        return
    columns = (TextColumn(label), BarColumn(bar_width=24), TextColumn("{task.description}"))
    with Bar(*columns, console=console, refresh_per_second=8) as bar:
        task = bar.add_task("starting", total=None)

        def watch(progress: "Progress") -> None:
            bar.update(task, total=progress.rounds, completed=progress.rounds_done, description=line(progress))

        yield watch


@contextmanager
def counting(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that counts rounds; nothing if the output is not a terminal."""
    columns = (TextColumn(label), BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total} rounds"))
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


def _lines(console: Console, label: str) -> "Watch":
    last_line = time.monotonic()

    def watch(progress: "Progress") -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= EVERY or progress.rounds_done == progress.rounds:
            console.print(f"{label}  {line(progress)}", soft_wrap=True)
            last_line = time.monotonic()

    return watch


def line(progress: "Progress") -> str:
    """Round, loss, accuracy, bytes, dropouts if there were any, time left."""
    whole = progress.rounds_done == int(progress.rounds_done)
    done = f"{progress.rounds_done:.{0 if whole else 1}f}"
    loss = f"{progress.loss:.3f}" if progress.loss is not None else "–"
    accuracy = f"{progress.accuracy:.1%}" if progress.accuracy is not None else "–"
    left = duration(progress.seconds_left) if progress.seconds_left is not None else "–"
    dropped = f"dropped {progress.dropouts:,}  " if progress.dropouts else ""
    return (
        f"round {done}/{progress.rounds}  loss {loss}  accuracy {accuracy}  "
        f"up {size(progress.uplink_bytes)}  down {size(progress.downlink_bytes)}  "
        f"{dropped}{left} left"
    )


def note(remarks: Console, advice: str) -> None:
    remarks.print(f"note: {advice}", soft_wrap=True)


def result(console: Console, summary: "Summary", folder: Path) -> None:
    """The table of a finished run, and its folder."""
    console.print(summary_table(summary))
    console.print(f"  folder            {folder}", soft_wrap=True)


def summary_table(summary: "Summary") -> Table:
    """A finished run in a few lines."""
    weights = 4 * summary["n_weights"]
    table = Table(show_header=False, box=None, padding=(0, 2))
    rows = {
        "test accuracy": _accuracy(summary),
        **_detailed_accuracy(summary),
        "rounds": f"{summary['rounds']:,} in {duration(summary['seconds'])}" + _skipped(summary),
        "forward passes": f"{summary['forwards']:,}{_partly(summary['supports'])}",
        "up": f"{summary['uplink_bytes_per_client_round']:,} bytes per client and round",
        "down": f"{summary['downlink_bytes_per_client_round']:,} bytes per client and round",
        "weights": f"{summary['n_weights']:,} ({weights:,} bytes), sha256 {summary['weights_sha256'][:16]}…",
        "clipped": f"{summary['clipped']:,} values",
        "secure sum": summary["secure"],
        "dropouts": f"{summary['dropouts']:,} replies missing",
        "refusals": f"{summary['refusals']:,} messages (the reasons are in the journal)",
        "peak memory": f"{summary['peak_rss_mb']:,.0f} MB, whole process",
    }
    if "baseline_test_accuracy" in summary:
        rows["backpropagation"] = (
            f"{summary['baseline_test_accuracy']:.2%} in {duration(summary['baseline_seconds'])}, "
            f"{summary['baseline_uplink_bytes_per_client_round']:,} bytes up"
        )
    for name, value in rows.items():
        if name not in ("clipped", "dropouts", "refusals") or summary[name]:
            table.add_row(name, value)
    return table


def _accuracy(summary: "Summary") -> str:
    if "test_accuracy" not in summary:
        return "not measured: no test set"
    return f"{summary['test_accuracy']:.2%}  (without averaging: {summary['test_accuracy_last']:.2%})"


def costs_table(costs: "Costs") -> Table:
    """What a run will cost, in a few lines."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    share = costs.uplink_bytes / costs.weights_bytes
    rows = {
        "weights": f"{costs.n_weights:,}  ({size(costs.weights_bytes)})",
        "clients": f"{costs.clients_per_round:,} a round, {costs.samples_per_client:,} samples each (median)",
        "hidden among": f"{costs.clients_per_sum:,} clients: the fewest that are summed together",
        "forward passes": f"{costs.forwards:,} per client and round, {costs.forwards_in_all:,} in all"
        + _partly(costs.supports),
        "up": f"{costs.uplink_bytes:,} bytes per client and round  ({share:.1%} of the weights)",
        "down": f"{costs.downlink_bytes:,} bytes per client and round; {costs.join_bytes:,} once to join",
        "secure sum": f"{costs.secure_bytes:,} bytes of these"
        if costs.secure_bytes
        else "off: the server sees each client",
        "memory": _memory(costs.memory_bytes),
    }
    if costs.alignment is not None:
        rows["alignment"] = f"cos {costs.alignment:.3f} expected with the gradient"
    if costs.precision is not None:
        rows["a scalar"] = (
            f"{costs.precision.typical:.3g} typical; {costs.precision.noise:.2%} of it rounding, "
            f"{costs.precision.quantum:.3%} a ring step"
        )
    for name, value in rows.items():
        if name != "hidden among" or costs.secure_bytes:
            table.add_row(name, value)
    return table


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


def consoles() -> tuple[Console, Console]:
    """One console for results (stdout), one for remarks (stderr)."""
    return Console(highlight=False, markup=False), Console(file=sys.stderr, highlight=False, markup=False)


def _detailed_accuracy(summary: "Summary") -> dict[str, str]:
    """Top-5 accuracy and the accuracy on each domain, if the run measured them."""
    rows = {}
    if "test_top5" in summary:
        rows["top-5 accuracy"] = f"{summary['test_top5']:.2%}"
    if "test_domains" in summary:
        domains = summary["test_domains"].items()
        rows["domains"] = ", ".join(f"{name} {measured['accuracy']:.2%}" for name, measured in domains)
    return rows


def _memory(count: int | None) -> str:
    if count is None:
        return "not known: this runtime does not say"
    return f"about {size(count)} of arrays at most on a client, beside its runtime and samples"


def _partly(supports: str) -> str:
    return "" if supports == "dense" else f", each only the part that its {supports} change"


def _skipped(summary: "Summary") -> str:
    return f", {summary['skipped_rounds']:,} skipped" if summary["skipped_rounds"] else ""
