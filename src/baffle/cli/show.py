"""What people see in a terminal: the result of a run, what a run will cost, a partition, and progress.

Progress is a live line that fits the terminal. Where there is none, it is plain lines: at whole rounds, and every few
seconds of a round that takes longer.
"""

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.progress import BarColumn, Progress as Bar, TextColumn
from rich.table import Table

from baffle.errors import BaffleError
from baffle.report.words import duration, is_share, metric_name, round_number, shown_loss, size

if TYPE_CHECKING:
    from baffle.data.partition import Holding
    from baffle.grid.job import Event
    from baffle.grid.play import Standing, Watch as WatchGrid
    from baffle.measuring.costs import Costs
    from baffle.server.recorder import Progress, Summary, Watch

ACCURACIES = ["accuracy", "top5"]  # the metrics of runs that were made before summaries named their metrics
RARE = ("clipped", "dropouts", "refusals")  # rows that are left out where there was none
MOST_LINES = 40  # of more clients than this, only a selection is shown
SHOWN = 11  # lines of a selection: the smallest client, the largest, and others at even steps between them
WIDTH = 20  # characters of the longest bar of a partition
LEVELS = "▁▂▃▄▅▆▇█"
DRAWN_ROW = "drawn from their law around a gradient by backpropagation, not probed"
SOONEST, LATEST = 1.0, 10.0  # the least and the most seconds between two lines where there is no terminal
LINES = 10  # a run has at least this many lines, unless they would come too often
BAR, SHORT_BAR = 24, 8  # characters of a bar, and of one in a terminal of less than a hundred columns


def consoles() -> tuple[Console, Console]:
    """One console for results (stdout), one for remarks (stderr)."""
    return _console(sys.stdout), _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    """FORCE_COLOR, which many CI systems set, asks for colours; it does not make a file a terminal that animates."""
    interactive = None if stream.isatty() else False
    return Console(file=stream, highlight=False, markup=False, force_interactive=interactive)


def say(console: Console, words: str) -> None:
    """Print a line that the terminal may wrap, and nothing else does."""
    console.print(words, soft_wrap=True)


def note(remarks: Console, advice: str) -> None:
    say(remarks, f"note: {advice}")


def result(console: Console, summary: "Summary", folder: Path, report: Path | None = None) -> None:
    """The rows of a finished run, its folder, and its report if there is one."""
    rows = summary_rows(summary, folder) | {"folder": str(folder)} | ({"report": str(report)} if report else {})
    say(console, aligned(rows))


def made_report(remarks: Console, write: Callable[[], Path]) -> Path | None:
    """Write a report. If that fails, say why: the run itself is finished."""
    try:
        return write()
    except ModuleNotFoundError as fault:
        if fault.name != "plotly":
            raise
        why = "it needs plotly: pip install 'baffle[report]'"
    except BaffleError as fault:
        why = str(fault)
    say(remarks, f"no report was made: {why}")
    return None


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], leave_out: Sequence[str] = ()) -> Table:
    """A table whose first column has names, and the others numbers."""
    table, shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False), [title not in leave_out for title in head]
    for place, title in enumerate(compress(head, shown)):
        table.add_column(title, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*compress(row, shown))
    return table


def aligned(rows: Mapping[str, str]) -> str:
    """A line for each name and value, with the values in one column."""
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def summary_rows(summary: "Summary", folder: Path) -> dict[str, str]:
    """A finished run in a few lines."""
    skipped = f", {summary['skipped_rounds']:,} skipped" if summary["skipped_rounds"] else ""
    weights = f"{summary['n_weights']:,} ({4 * summary['n_weights']:,} bytes)"
    rows = {
        **_measured(summary),
        "rounds": f"{summary['rounds']:,}{skipped}",
        "time": _time(summary),
        "scalars": DRAWN_ROW if summary.get("scalars") == "drawn" else "",
        "forward passes": f"{summary['forwards']:,}{_kind(summary['supports'], summary.get('derivatives', ''))}",
        "up": f"{summary['uplink_bytes_per_client_round']:,} bytes per client and round",
        "down": f"{summary['downlink_bytes_per_client_round']:,} bytes per client and round",
        "weights": f"{weights}, sha256 {summary['weights_sha256'][:16]}…",
        "clipped": f"{summary['clipped']:,} values",
        "secure sum": summary["secure"],
        "privacy": "",
        "dropouts": f"{summary['dropouts']:,} replies missing",
        "refusals": f"{summary['refusals']:,} messages; to read them: baffle status {shlex.quote(str(folder))}",
        "peak memory": f"{summary['peak_rss_mb']:,.0f} MB, whole process",
    }
    private = "epsilon" in summary
    if private:
        rows["privacy"] = (
            f"ε = {summary['epsilon']:.3g} at δ = {summary['delta']:g}, noise {summary['noise']:.4g} × the "
            f"clipping norm {summary['clip']:g}; losses are not measured: the run is private"
        )
    headline = summary.get("metrics", ACCURACIES)[0]
    if (value := summary.get(f"baseline_test_{headline}")) is not None:
        rows["backpropagation"] = (
            f"{measure(headline, value)} in {duration(summary['baseline_seconds'])}, "
            f"{summary['baseline_uplink_bytes_per_client_round']:,} bytes up{', without noise' if private else ''}"
        )
    return {name: value for name, value in rows.items() if value and (name not in RARE or summary[name])}


def _time(summary: "Summary") -> str:
    """The seconds of all rounds, and how many of them were spent on probing or training."""
    seconds = summary["seconds"]
    if "evaluation_seconds" not in summary:
        return f"{duration(seconds)} in all"
    work = "probing" if summary["estimator"] == "probe" else "training"
    inside = max(0.0, seconds - summary["evaluation_seconds"] - summary["bookkeeping_seconds"])
    return f"{duration(seconds)} in all, {duration(inside)} of it {work}"


def measure(metric: str, value: float | None, decimals: int = 2) -> str:
    """The value of a metric as people read it: shares in percent."""
    if value is None:
        return "not finite"
    return f"{value:.{decimals}%}" if is_share(metric) else f"{value:.4g}"


def _measured(summary: "Summary") -> dict[str, str]:
    """All metrics of a run, the headline first and also for each domain."""
    headline, *others = summary.get("metrics", ACCURACIES)
    title = metric_name(f"test_{headline}")
    if f"test_{headline}" not in summary:
        return {title: "not measured: no test set"}
    value, last = (measure(headline, summary[f"test_{headline}{which}"]) for which in ("", "_last"))
    rows = {title: f"{value}  (without averaging: {last})"}
    found = {name: summary[f"test_{name}"] for name in others if f"test_{name}" in summary}
    rows |= {metric_name(f"test_{name}"): measure(name, value) for name, value in found.items()}
    if "test_domains" in summary:
        domains = summary["test_domains"].items()
        rows["domains"] = ", ".join(f"{name} {measure(headline, values[headline])}" for name, values in domains)
    return rows


def _kind(supports: str, derivatives: str) -> str:
    """What a run's forward passes are, if they are not plain ones."""
    if derivatives == "gradient":
        return ", each with a backward pass"
    return "" if supports in ("dense", "layers") else f", each only the part that its {supports} change"


def costs_rows(costs: "Costs") -> dict[str, str]:
    """What a run will cost, in a few lines."""
    share = costs.uplink_bytes / costs.weights_bytes
    memory = "not known: this runtime does not say"
    if costs.memory_bytes is not None:
        memory = f"about {size(costs.memory_bytes)} of arrays at most on a client, beside its runtime and samples"
    rows = {
        "weights": f"{costs.n_weights:,}  ({size(costs.weights_bytes)})",
        "scalars": DRAWN_ROW,
        "clients": f"{costs.clients_per_round:,} a round, {costs.samples_per_client:,} samples each (median)",
        "hidden among": f"{costs.clients_per_sum:,} clients: the fewest that are summed together",
        "forward passes": f"{costs.forwards:,} per client and round, {costs.forwards_in_all:,} in all"
        + _kind(costs.supports, costs.derivatives),
        "up": f"{costs.uplink_bytes:,} bytes per client and round  ({share:.1%} of the weights)",
        "down": f"{costs.downlink_bytes:,} bytes per client and round; {costs.join_bytes:,} once to join",
        "secure sum": f"{costs.secure_bytes:,} bytes of these",
        "memory": memory,
    }
    if costs.scalars != "drawn":
        del rows["scalars"]
    if costs.head_bytes:
        rows["exact head"] = f"{costs.head_bytes:,} bytes of those up"
    if not costs.secure_bytes:
        del rows["hidden among"]
        rows["secure sum"] = "off: the server sees each client"
    if costs.alignment is not None:
        rows["alignment"] = f"cos {costs.alignment:.3f} expected with the gradient"
    if contrast := costs.contrast:
        noise = f"noise of dense directions × {contrast.noise:.2g}"
        rows["layers"] = f"{contrast.layers:,}; gradients differ {contrast.factor:.2g}-fold, {noise}"
    if precision := costs.precision:
        rows["a scalar"] = (
            f"{precision.typical:.3g} typical; {precision.noise:.2%} of it rounding, "
            f"{precision.curvature:.1%} curvature, {precision.quantum:.3%} a ring step"
        )
    if privacy := costs.privacy:
        rows["privacy"] = (
            f"ε = {privacy.epsilon:.3g} at δ = {privacy.delta:g} for a client that takes part in all "
            f"{privacy.rounds:,} rounds"
        )
        share = privacy.noise_on_value / privacy.value if privacy.value else math.inf
        rows["noise"] = (
            f"{privacy.noise:.4g} × the clipping norm {privacy.clip:g}, a part in {privacy.sharers:,} of the "
            f"variance from each client; {share:.0%} of a mean value ({privacy.value:.2g}): a sum is worth "
            f"{privacy.worth:.2g} of {privacy.values:,} values without noise"
        )
    return rows


def partition_view(held: list["Holding"]) -> Group:
    """A partition: a few figures, then a line for each client, or a selection of lines for a large federation. A line
    has a bar for the client's samples, and a small bar for each class."""
    shown, remark = held, ""
    if len(held) > MOST_LINES:
        ranked = sorted(held, key=lambda holding: holding.samples)
        shown = [ranked[place * (len(held) - 1) // (SHOWN - 1)] for place in range(SHOWN)]
        remark = f"{SHOWN} of {len(held):,} clients, from the smallest to the largest:"
    most = max(holding.samples for holding in held)
    grouped = any(holding.group for holding in shown)
    lines = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("client", *(["of"] if grouped else []), "samples", "", "classes", "largest"):
        lines.add_column(title, justify="right" if title in ("client", "samples") else "left", overflow="fold")
    for holding in shown:
        bar = "█" * max(1, round(WIDTH * holding.samples / most))
        top, largest = max(holding.classes, default=0), ""
        if top:
            largest = f"{top / sum(holding.classes):.0%} are class {holding.classes.index(top)}"
        cells = [str(holding.client), f"{holding.samples:,}", bar, spark(holding.classes), largest]
        lines.add_row(*cells[:1], *([holding.group] if grouped else []), *cells[1:])
    return Group(_figures(held), remark, lines)


def spark(counts: list[int]) -> str:
    """A character for each class, as high as its share of the client's largest class; a dot for no sample."""
    top = max(counts, default=0)
    return "".join(LEVELS[-(-count * len(LEVELS) // top) - 1] if count else "·" for count in counts)


def _figures(held: list["Holding"]) -> Table:
    def spread(numbers: list[int]) -> str:
        return f"{min(numbers):,} to {max(numbers):,} a client, median {median(numbers):,.0f}"

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_row("clients", f"{len(held):,}, with {sum(holding.samples for holding in held):,} samples in all")
    table.add_row("samples", spread([holding.samples for holding in held]))
    if held[0].classes:
        table.add_row("classes", spread([sum(count > 0 for count in holding.classes) for holding in held]))
    for domain in sorted({holding.domain for holding in held if holding.domain}):
        sizes = [holding.samples for holding in held if holding.domain == domain]
        table.add_row(domain, f"{len(sizes):,} clients, {sum(sizes):,} samples")
    return table


@contextmanager
def watching(console: Console, label: str, now: Callable[[], float] = time.monotonic) -> Iterator["Watch"]:
    """A live line of progress on a terminal; otherwise a plain line every few seconds, at whole rounds. `now` is the
    clock."""
    if not console.is_interactive:
        yield _lines(console, label, now)
        return
    width = BAR if console.width >= 100 else SHORT_BAR
    room = console.width - len(label) - width - 3
    columns = (TextColumn(label), BarColumn(bar_width=width), TextColumn("{task.description}"))
    with Bar(*columns, console=console, refresh_per_second=8) as bar:
        task = bar.add_task("starting", total=None)

        def watch(progress: "Progress") -> None:
            words = progress_line(progress, room)
            bar.update(task, total=progress.rounds, completed=progress.rounds_done, description=words)

        yield watch


@contextmanager
def many_runs(console: Console) -> Iterator["WatchGrid"]:
    """A live line that counts the runs of a grid and names those that are played; without a terminal, a line for each
    run that ends. Lost and failed runs always have a line of their own."""

    def ended(event: "Event", standing: "Standing") -> str:
        why = event.failure.words if event.failure else ""
        words = {"lost": f"{why}, it is started again", "failed": f"failed: {why}"}.get(event.kind, "finished")
        return f"{event.name}  {words}  {counts(standing)}"

    def counts(standing: "Standing") -> str:
        left = f"about {duration(standing.seconds_left)} left" if standing.seconds_left is not None else "– left"
        failed = f", {standing.failed} failed" if standing.failed else ""
        return f"{standing.done}/{standing.runs} runs{failed}  {left}"

    if not console.is_terminal:

        def tell(event: "Event", standing: "Standing") -> None:
            if event.kind in ("ended", "failed", "lost"):
                say(console, ended(event, standing))

        yield tell
        return
    with Bar(BarColumn(bar_width=SHORT_BAR), TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("starting", total=None)

        def draw(event: "Event", standing: "Standing") -> None:
            if event.kind in ("failed", "lost"):
                say(console, ended(event, standing))
            parts = [progress.rounds_done / progress.rounds for progress in standing.going.values() if progress]
            going = "; ".join(name for name in standing.going)
            words = f"{counts(standing)}  {going}"[: max(0, console.width - SHORT_BAR - 2)]
            bar.update(task, total=standing.runs, completed=standing.done + sum(parts), description=words)

        yield draw


@contextmanager
def counting(console: Console, label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that counts rounds; nothing if the output is not a terminal."""
    columns = (TextColumn(label), BarColumn(bar_width=BAR), TextColumn("{task.completed}/{task.total} rounds"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def telling(console: Console, label: str) -> Iterator[Callable[[str], None]]:
    """The current step in words: one live line on a terminal; otherwise a plain line for each step."""
    if not console.is_interactive:
        yield lambda step: console.print(f"{label}  {step}", soft_wrap=True, highlight=False)
        return
    with console.status(label) as status:
        yield lambda step: status.update(f"{label}  {step}")


@contextmanager
def trying(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that counts the rounds of all trials and names the current step; without a terminal, a line a step."""
    if not console.is_interactive:
        yield lambda words, done, _of: say(console, f"round {done}  {words}")
        return
    with Bar(TextColumn("trying"), BarColumn(BAR), TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda words, done, of: bar.update(task, completed=done, total=max(of, done), description=words)


def progress_line(progress: "Progress", room: int = 1000) -> str:
    """Round, loss, the first metric, bytes, dropouts if there were any, time left. A private run has ε instead of a
    loss, which is not measured there. If there is no room for all of it, what matters least is left out."""
    whole = progress.rounds_done == int(progress.rounds_done)
    loss = f"loss {shown_loss(progress.loss)}" if progress.loss is not None else "loss –"
    known = progress.value is not None
    parts = {
        "round": f"round {progress.rounds_done:.{0 if whole else 1}f}/{progress.rounds}",
        "loss": loss if progress.epsilon is None else f"ε {progress.epsilon:.3g}",
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


def _lines(console: Console, label: str, now: Callable[[], float]) -> "Watch":
    began = said = now()
    before, last = -1.0, 0.0

    def watch(progress: "Progress") -> None:
        nonlocal before, last, said
        done = progress.rounds_done
        before = done - 1 if before < 0 else before  # a run that is resumed does not begin with the first round
        if done != int(done):
            if now() - said >= LATEST:
                say(console, f"{label}  {progress_line(progress)}")
                said = now()
            return
        step = step_of(progress.rounds, (now() - began) / max(1.0, done - before))
        if (done % step == 0 and done - last >= step) or done == progress.rounds:
            say(console, f"{label}  {progress_line(progress)}")
            last, said = done, now()

    return watch


def step_of(rounds: int, seconds: float) -> int:
    """After how many rounds, each of this many seconds, there is a line: 1, 2, 5, 10, 20, 50, …"""
    soonest, latest = (round_number(limit / max(seconds, 1e-6)) for limit in (SOONEST, LATEST))
    return max(soonest, min(latest, round_number(rounds / LINES)))
