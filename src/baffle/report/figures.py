"""The numbers of a run that matter most, each with a name and a remark."""

from collections.abc import Iterable
from dataclasses import dataclass

from baffle.core.ports import CONTRIBUTED
from baffle.report.charts import traffic_of
from baffle.report.record import RunRecord, number
from baffle.report.series import series_of
from baffle.report.words import duration, measured, metric_name, size


@dataclass(frozen=True)
class Figure:
    name: str
    value: str
    note: str = ""


def figures_of(run: RunRecord) -> list[Figure]:
    """The most important metric first. What a run has not measured has no figure."""
    return [
        *_metrics(run),
        *_privacy(run),
        _rounds(run),
        _time(run),
        _forwards(run),
        _bytes(run),
        _alignment(run),
        _clients(run),
    ]


def _metrics(run: RunRecord) -> Iterable[Figure]:
    for metric in run.test_metrics[:1]:
        notes = []
        last, baseline = run.last(f"{metric}_last"), run.baseline.last(metric) if run.baseline else None
        if last is not None and last != run.last(metric):
            notes.append(f"without averaging {measured(metric, last)}")
        if baseline is not None:
            notes.append(f"backpropagation {measured(metric, baseline)}")
        yield Figure(metric_name(metric), measured(metric, run.last(metric)), "; ".join(notes))
    if not run.test_metrics:
        yield Figure("test metrics", "–", "not measured: no test set, or not yet due")
    losses = [metrics.loss for metrics in run.rounds if number(metrics.loss) is not None]
    if losses:
        yield Figure("training loss", measured("loss", losses[-1]), f"{measured('loss', losses[0])} in the first round")


def _privacy(run: RunRecord) -> Iterable[Figure]:
    privacy, spent = (
        run.plan.privacy,
        [metrics.epsilon for metrics in run.rounds if number(metrics.epsilon) is not None],
    )
    if privacy.on:
        value = f"ε = {spent[-1]:.3g}" if spent else "–"
        yield Figure("privacy", value, f"at δ = {privacy.delta:g}; so losses are not measured")


def _rounds(run: RunRecord) -> Figure:
    skipped = sum(not metrics.contributors for metrics in run.rounds)
    of = "" if run.state == "finished" else f" of {run.plan.rounds:,}"
    return Figure("rounds", f"{run.rounds_done:,}{of}", f"{skipped:,} skipped" if skipped else "none skipped")


def _time(run: RunRecord) -> Figure:
    pace = f"{run.seconds / run.rounds_done:.2f} s a round" if run.rounds_done else ""
    beside = f"; backpropagation {duration(run.baseline.seconds)}" if run.baseline else ""
    return Figure("time", duration(run.seconds), f"{pace}{beside}")


def _forwards(run: RunRecord) -> Figure:
    column = series_of(run).columns.get("forwards") or [None]
    done, plan = column[-1], run.plan
    if plan.estimator != "probe":
        return Figure("forward passes", "–" if done is None else f"{done:,.0f}", "with as many backward passes")
    note = f"K = {plan.probe.k:,} directions a round"
    if plan.probe.supports not in ("dense", "layers"):
        note += f", each through the part that its {plan.probe.supports} change"
    return Figure("forward passes", "–" if done is None else f"{done:,.0f}", note)


def _bytes(run: RunRecord) -> Figure:
    if not run.rounds:
        return Figure("bytes up", "–", "per client and round")
    up, down = traffic_of(run)
    share = up / (4 * run.n_weights)
    return Figure("bytes up", size(up), f"per client and round, {share:.2%} of the weights; down {size(down)}")


def _alignment(run: RunRecord) -> Figure:
    alignment = run.alignment
    if alignment.expected is None:
        return Figure("alignment", "–", alignment.missing)
    expected = f"{alignment.expected:.3f} expected"
    if alignment.measured is None:
        return Figure("alignment", expected, f"cosine with the gradient; not measured: {alignment.missing}")
    value = f"{alignment.measured:.3f} ± {alignment.error:.3f}"
    return Figure("alignment", value, f"cosine of estimate and gradient, measured; {expected}")


def _clients(run: RunRecord) -> Figure:
    present = sum(1 for ways in run.attendance.by_client.values() if ways.get(CONTRIBUTED))
    secure = {"on": "secure sums", "off": "no secure sums"}.get(run.plan.secure.mode, "secure sums, malicious server")
    return Figure("clients", f"{run.attendance.clients:,}", f"{present:,} contributed; {secure}")
