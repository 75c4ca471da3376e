"""What a person reads after a run, or before it: rows of a name and a value, aligned."""

import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from baffle.report.words import duration, is_share, metric_name, size

if TYPE_CHECKING:
    from baffle.server.recorder import Summary
    from baffle.task.costs import Costs
    from baffle.task.privacy import Privacy

ACCURACIES = ["accuracy", "top5"]
"""The metrics of runs whose summary names none, because they were made before there were others."""


def note(remarks: Console, advice: str) -> None:
    remarks.print(f"note: {advice}", soft_wrap=True)


def result(console: Console, summary: "Summary", folder: Path, report: Path | None = None) -> None:
    """The rows of a finished run, its folder, and its report if there is one."""
    rows = summary_rows(summary, folder) | {"folder": str(folder)} | ({"report": str(report)} if report else {})
    console.print(aligned(rows), soft_wrap=True)


def aligned(rows: Mapping[str, str]) -> str:
    """A line for each name and value, the values below one another."""
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())


def summary_rows(summary: "Summary", folder: Path) -> dict[str, str]:
    """A finished run in a few lines."""
    weights = 4 * summary["n_weights"]
    rows = {
        **_measured(summary),
        "rounds": f"{summary['rounds']:,}" + _skipped(summary),
        "time": _time(summary),
        "forward passes": f"{summary['forwards']:,}{_partly(summary['supports'])}",
        "up": f"{summary['uplink_bytes_per_client_round']:,} bytes per client and round",
        "down": f"{summary['downlink_bytes_per_client_round']:,} bytes per client and round",
        "weights": f"{summary['n_weights']:,} ({weights:,} bytes), sha256 {summary['weights_sha256'][:16]}…",
        "clipped": f"{summary['clipped']:,} values",
        "secure sum": summary["secure"],
        **_spent(summary),
        "dropouts": f"{summary['dropouts']:,} replies missing",
        "refusals": f"{summary['refusals']:,} messages; to read them: baffle status {shlex.quote(str(folder))}",
        "peak memory": f"{summary['peak_rss_mb']:,.0f} MB, whole process",
    }
    headline = summary.get("metrics", ACCURACIES)[0]
    if (value := summary.get(f"baseline_test_{headline}")) is not None:
        rows["backpropagation"] = (
            f"{measure(headline, value)} in {duration(summary['baseline_seconds'])}, "
            f"{summary['baseline_uplink_bytes_per_client_round']:,} bytes up"
            + (", without noise" if "epsilon" in summary else "")
        )
    rare = ("clipped", "dropouts", "refusals")
    return {name: value for name, value in rows.items() if name not in rare or summary[name]}


def _spent(summary: "Summary") -> dict[str, str]:
    """What a private run has cost a client that took part in every round."""
    if "epsilon" not in summary:
        return {}
    return {
        "privacy": f"ε = {summary['epsilon']:.3g} at δ = {summary['delta']:g}, noise {summary['noise']:.4g} × the "
        f"clipping norm {summary['clip']:g}; losses are not measured: the run is private"
    }


def _time(summary: "Summary") -> str:
    """What the seconds are: those of all rounds, and how many of them went into probing or training."""
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
    if f"test_{headline}" not in summary:
        return {_title(headline): "not measured: no test set"}
    value, last = (measure(headline, summary[f"test_{headline}{which}"]) for which in ("", "_last"))
    rows = {_title(headline): f"{value}  (without averaging: {last})"}
    rows |= {_title(name): measure(name, summary[f"test_{name}"]) for name in others if f"test_{name}" in summary}
    if "test_domains" in summary:
        domains = summary["test_domains"].items()
        rows["domains"] = ", ".join(f"{name} {measure(headline, values[headline])}" for name, values in domains)
    return rows


def _title(metric: str) -> str:
    return metric_name(f"test_{metric}")


def costs_rows(costs: "Costs") -> dict[str, str]:
    """What a run will cost, in a few lines."""
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
    if costs.contrast is not None:
        rows["layers"] = (
            f"{costs.contrast.layers:,}; gradients differ {costs.contrast.factor:.2g}-fold, noise of dense directions "
            f"× {costs.contrast.noise:.2g}"
        )
    if costs.precision is not None:
        rows["a scalar"] = (
            f"{costs.precision.typical:.3g} typical; {costs.precision.noise:.2%} of it rounding, "
            f"{costs.precision.curvature:.1%} curvature, {costs.precision.quantum:.3%} a ring step"
        )
    if costs.privacy is not None:
        rows |= _privacy_rows(costs.privacy)
    return {name: value for name, value in rows.items() if name != "hidden among" or costs.secure_bytes}


def _privacy_rows(privacy: "Privacy") -> dict[str, str]:
    share = privacy.noise_on_value / privacy.value if privacy.value else math.inf
    return {
        "privacy": f"ε = {privacy.epsilon:.3g} at δ = {privacy.delta:g} for a client that takes part in all "
        f"{privacy.rounds:,} rounds",
        "noise": f"{privacy.noise:.4g} × the clipping norm {privacy.clip:g}, a part in {privacy.sharers:,} of the "
        f"variance from each client; {share:.0%} of a mean value ({privacy.value:.2g})",
    }


def consoles() -> tuple[Console, Console]:
    """One console for results (stdout), one for remarks (stderr)."""
    return Console(highlight=False, markup=False), Console(file=sys.stderr, highlight=False, markup=False)


def _memory(count: int | None) -> str:
    if count is None:
        return "not known: this runtime does not say"
    return f"about {size(count)} of arrays at most on a client, beside its runtime and samples"


def _partly(supports: str) -> str:
    return "" if supports in ("dense", "layers") else f", each only the part that its {supports} change"


def _skipped(summary: "Summary") -> str:
    return f", {summary['skipped_rounds']:,} skipped" if summary["skipped_rounds"] else ""
