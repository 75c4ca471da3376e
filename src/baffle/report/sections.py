"""The parts of a page, each as HTML, in which all text is escaped. A live page replaces them one by one."""

import html
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.errors import one_line
from baffle.plan import Plan
from baffle.plan.functions import named_by
from baffle.report.charts import AXES, Partition, beside, series_of, traffic_of
from baffle.report.record import LEFT_OUT, RunRecord, by_phase, number, refusals
from baffle.report.words import duration, measured, metric_name, size

MOST_CLIENTS = 60  # in a table; those that were missing most often are listed
MOST_SETTING = 80  # characters of a setting that are shown


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Html | Iterable["Content"]
Cells = Sequence[Content]


VOID = ("img", "input", "meta", "source")  # elements without content


def element(tag: str, /, *content: Content, **attributes: str | bool | None) -> Html:
    """An element. `class_` stands for the attribute `class`, and `aria_label` for `aria-label`. True gives an attribute
    without a value; False and None leave it out."""
    told = ""
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        told += f" {name}" if value is True else f' {name}="{html.escape(value)}"' if isinstance(value, str) else ""
    return Html(f"<{tag}{told}>" if tag in VOID else f"<{tag}{told}>{joined(content)}</{tag}>")


def joined(content: Content) -> Html:
    """Join texts and elements, and escape the texts."""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(html.escape(content))
    return Html("".join(map(joined, content)))


def data_block(name: str, data: Mapping[str, Any]) -> Html:
    """Data for the page's script. No text in it can end the block or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def table(head: Sequence[Content], rows: Sequence[Cells], label: str, numbers: Sequence[int] = ()) -> Html:
    """A table with headings for rows and columns, in a box that scrolls on narrow screens."""

    def cell(place: int, content: Content, *, top: bool) -> Html:
        kind = "number" if place in numbers else None
        if top:
            return element("th", content, scope="col", class_=kind)
        if place == 0:
            return element("th", content, scope="row", class_="plain")
        return element("td", content, class_=kind)

    top = element("thead", element("tr", [cell(place, text, top=True) for place, text in enumerate(head)]))
    body = element("tbody", [element("tr", [cell(i, c, top=False) for i, c in enumerate(row)]) for row in rows])
    return element("div", element("table", top, body), class_="scroll", tabindex="0", role="region", aria_label=label)


def figure(chart: Mapping[str, Any], level: str = "h3", *, wide: bool = False) -> Html:
    """A figure for a chart: its title, description, drawing, and numbers."""
    title = element(level, chart["title"][:1].upper() + chart["title"][1:], id=f"{chart['id']}-title")
    numbers = element(
        "details",
        element("summary", f"Numbers: {chart['title']}"),
        element("div", class_="scroll", tabindex="0", role="region", aria_label=f"Numbers: {chart['title']}"),
    )
    look = "plot low" if chart.get("stacked") else "plot"
    drawing = element("div", class_=look, id=chart["id"], role="img", aria_labelledby=f"{chart['id']}-title")
    caption = element("figcaption", title, element("p", chart["about"]))
    return element("figure", caption, drawing, numbers, class_="wide" if wide else None)


def named(place: int, name: str) -> Html:
    """A run's name with its colour."""
    return joined([element("span", class_=f"mark run-{place % 6}", aria_hidden="true"), name])


def state_words(run: RunRecord) -> str:
    if run.state == "finished":
        return "finished"
    if run.state == "going on":
        left = run.seconds_left
        soon = "" if left is None else f", about {duration(left)} left"
        return f"going on, {run.rounds_done:,} of {run.plan.rounds:,} rounds{soon}"
    return f"not finished: silent for {duration(run.quiet_seconds)} when this page was made"


def key_figures(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    """The name, value and note of each, the most important first. What the run did not measure is left out."""
    yield from _results(run)
    yield from _costs(run)
    alignment = run.alignment
    expected = f"{alignment.expected or 0:.3f} expected"
    if alignment.expected is None:
        yield ("alignment", "–", alignment.missing)
    elif alignment.measured is None:
        yield ("alignment", expected, f"cosine with the gradient; not measured: {alignment.missing}")
    else:
        value = f"{alignment.measured:.3f} ± {alignment.error:.3f}"
        yield ("alignment", value, f"cosine of estimate and gradient, measured; {expected}")
    present = sum(1 for ways in run.attendance.by_client.values() if ways.get(CONTRIBUTED))
    secure = {"on": "secure sums", "off": "no secure sums"}.get(run.plan.secure.mode, "secure sums, malicious server")
    yield ("clients", f"{run.attendance.clients:,}", f"{present:,} contributed; {secure}")


def _results(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    for metric in run.test_metrics[:1]:
        notes = []
        last, baseline = run.last(f"{metric}_last"), run.baseline.last(metric) if run.baseline else None
        shown = run.last(metric)
        if last is not None and last != shown:
            hands_back_last = run.summary.get("returned") == "last"
            shown, other = (last, shown) if hands_back_last else (shown, last)
            notes.append(f"{'averaged' if hands_back_last else 'without averaging'} {measured(metric, other)}")
        if baseline is not None:
            notes.append(f"backpropagation {measured(metric, baseline)}")
        yield (metric_name(metric), measured(metric, shown), "; ".join(notes))
    if not run.test_metrics:
        yield ("test metrics", "–", "not measured: no test set, or not yet due")
    if losses := [metrics.loss for metrics in run.rounds if number(metrics.loss) is not None]:
        first = f"{measured('loss', losses[0])} in the first round"
        yield ("training loss", measured("loss", losses[-1]), first)
    if run.plan.privacy.on:
        spent = [metrics.epsilon for metrics in run.rounds if number(metrics.epsilon) is not None]
        value, delta = f"ε = {spent[-1]:.3g}" if spent else "–", run.plan.privacy.delta
        yield ("privacy", value, f"at δ = {delta:g}; so losses are not measured")


def _costs(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    plan = run.plan
    skipped = sum(not metrics.contributors for metrics in run.rounds)
    of = "" if run.state == "finished" else f" of {plan.rounds:,}"
    yield ("rounds", f"{run.rounds_done:,}{of}", f"{skipped:,} skipped" if skipped else "none skipped")
    pace = f"{run.seconds / run.rounds_done:.2f} s a round" if run.rounds_done else ""
    beside = f"; backpropagation {duration(run.baseline.seconds)}" if run.baseline else ""
    yield ("time", duration(run.seconds), f"{pace}{beside}")
    *_, done = series_of(run).columns.get("forwards") or [None]
    if plan.scalars == "drawn":
        k = f"from the law of K = {plan.probe.k:,} directions, around gradients by backpropagation"
        yield ("scalars", "drawn, not probed", k)
    note = f"K = {plan.probe.k:,} directions a round" if plan.estimator == "probe" else "with as many backward passes"
    if plan.estimator == "probe" and plan.probe.supports not in ("dense", "layers"):
        note += f", each through the part that its {plan.probe.supports} change"
    yield ("forward passes", "–" if done is None else f"{done:,.0f}", note)
    if not run.rounds:
        yield ("bytes up", "–", "per client and round")
        return
    up, down = traffic_of(run)
    share = up / (4 * run.n_weights)
    yield ("bytes up", size(up), f"per client and round, {share:.2%} of the weights; down {size(down)}")


def overview(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    columns = [
        {
            name: [element("span", value, class_="value"), element("span", note, class_="note")]
            for name, value, note in key_figures(run)
        }
        for run in runs
    ]
    if len(runs) == 1:
        first, *others = [(element("dt", name), element("dd", spans)) for name, spans in columns[0].items()]
        tiles = [element("div", first, class_="first"), *(element("div", other) for other in others)]
        return element("dl", tiles, class_="tiles")
    labels = dict.fromkeys(name for column in columns for name in column)
    rows: list[Cells] = [["state", *(state_words(run) for run in runs)]]
    rows += [[label, *(column.get(label, "–") for column in columns)] for label in labels]
    return table(["", *(named(place, name) for place, name in enumerate(names))], rows, "The runs side by side")


def key(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    """The legend of the lines."""
    items = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        mark = f"mark run-{place % 6}"
        items.append(element("li", element("span", class_=mark, aria_hidden="true"), name))
        if run.baseline:
            dash = element("span", class_=f"{mark} dash", aria_hidden="true")
            items.append(element("li", dash, beside(name, runs)))
    if any(run.is_averaged(metric) for run in runs for metric in run.test_metrics):
        items.append(element("li", element("span", class_="mark dots", aria_hidden="true"), "without averaging"))
    return element("ul", items, class_="key")


def axis_switch(known: set[str]) -> Html:
    """The choice of the axis. An axis that no run has data for is disabled."""
    short = {"rounds": "rounds", "forwards": "forward passes", "bytes": "bytes", "seconds": "seconds"}
    choices = list[Html]()
    for axis in AXES:
        state = {"checked": axis == "rounds", "disabled": axis not in known}
        button = element("input", type="radio", name="axis", value=axis, **state)
        choices.append(element("label", button, element("span", short[axis])))
    return element("fieldset", element("legend", "Drawn against"), choices)


def attendance(run: RunRecord) -> Html:
    """Who took part, by client and by phase, and what was refused."""
    total = run.attendance

    def absences(item: tuple[int, Mapping[str, int]]) -> tuple[int, object]:
        return -item[1].get(MISSING, 0) - item[1].get(LEFT_OUT, 0), item

    rows = [
        [f"client {client}", *(f"{ways.get(way, 0):,}" for way in (CONTRIBUTED, LEFT_OUT, MISSING))]
        for client, ways in sorted(sorted(total.by_client.items(), key=absences)[:MOST_CLIENTS])
    ]
    more = f", the {MOST_CLIENTS} that were missing most often" if len(total.by_client) > MOST_CLIENTS else ""
    label = f"Rounds of each client{more}"
    clients = table(["", "contributed", "left out", "no answer"], rows, label, numbers=(1, 2, 3))
    parts: list[Content] = [element("details", element("summary", label), clients)] if rows else []
    phases = by_phase(run.rounds)
    if phases:
        counts = [[phase, f"{silent:,}", f"{abstained:,}"] for phase, (silent, abstained) in phases.items()]
        head = ["phase", "no answer in time", "did not do what was asked"]
        parts += [element("h4", "By phase of a round"), table(head, counts, "Messages by phase", numbers=(1, 2))]
    else:
        parts.append(element("p", "Every message was answered in time, in every phase of every round.", class_="note"))
    if total.reasons:
        reasons = [[words, f"{count:,}"] for words, count in sorted(total.reasons.items(), key=lambda item: -item[1])]
        parts += [element("h4", "Why answers were left out"), table(["why", "times"], reasons, "Reasons", numbers=(1,))]
    return joined([*parts, _refusals(run)])


def _refusals(run: RunRecord) -> Html:
    total = sum(metrics.refusals for metrics in run.rounds)
    found = refusals(run.metrics)
    if not found and not total:
        return element("p", "The server refused nothing.", class_="note")
    rows = [[refusal.words, f"{refusal.count:,}", refusal.shown_rounds] for refusal in found]
    told = sum(refusal.count for refusal in found)
    left = f" Of {total - told:,} more the journal keeps only the number." if total > told else ""
    about = f"{total:,} in all, in the server’s words. A client’s own reasons are in its own log.{left}"
    listed = table(["what", "times", "rounds"], rows, "Refusals", numbers=(1,))
    return joined([element("h4", "What was refused"), element("p", about, class_="note"), listed])


def partition_words(partition: Partition) -> Html:
    if partition.missing:
        return element("p", partition.missing)
    samples = [holding.samples for holding in partition.holdings]
    held = f"{len(samples):,} clients hold {sum(samples):,} training samples"
    return element("p", f"{held}: {min(samples):,} to {max(samples):,} each.")


def domains(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    """The headline metrics of each domain, if the test set has domains. Those of a fit are its clients."""
    rows: list[Cells] = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        measured_domains = next((r["test_domains"] for r in reversed(run.metrics) if "test_domains" in r), None)
        for domain, values in measured_domains.items() if isinstance(measured_domains, dict) else ():
            words = values.items() if isinstance(values, dict) else ()
            shown = ", ".join(f"{metric} {measured(metric, value)}" for metric, value in words)
            rows.append([named(place, name), one_line(str(domain), 80), shown])
    if not rows:
        return Html("")
    one = "client" if all(run.given for run in runs) else "domain"
    return joined([element("h4", f"By {one}"), table(["run", one, "measured"], rows, f"Metrics of each {one}")])


def settings(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    """The settings that differ between the runs, or, of a single run, from the defaults."""
    plans = [_flat(msgspec.to_builtins(run.plan)) for run in runs]
    keys, about = differing(runs), "Settings that differ between the runs"
    if len(runs) == 1:
        plans.append(_flat(msgspec.to_builtins(Plan())))
        names, about = ["this run", "default"], "Settings unlike the defaults"
        keys = _differing(plans)
    if not keys and len(runs) > 1:
        return element("p", "All runs have the same settings.")
    heads = names if len(runs) == 1 else [named(place, name) for place, name in enumerate(names)]
    rows: list[Cells] = [[key, *(element("code", plan.get(key, "–")) for plan in plans)] for key in keys]
    return table(["setting", *heads], rows, about)


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """The keys of settings in which plans differ."""
    return _differing([_flat(msgspec.to_builtins(run.plan)) for run in runs])


def _differing(plans: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for plan in plans for key in plan)
    return [key for key in keys if len({plan.get(key) for plan in plans}) > 1]


def _flat(tables: Mapping[str, Any], path: str = "") -> dict[str, str]:
    flat = dict[str, str]()
    for name, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[f"{path}{name}"] = one_line(as_written(value), MOST_SETTING)
    return flat


def as_written(value: Any) -> str:
    """A setting as people write it: lists with commas, tables as key = value, words without quotes."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {as_written(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        nested = any(isinstance(inner, (list, tuple, Mapping)) for inner in value)
        return ("; " if nested else ", ").join(map(as_written, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "“”"


SEED = {"name", "seed", "ring.n_max", "probe.layout", "task.model.weights", "task.model.says"}
"""What runs of one plan with several seeds may differ in, besides how they are executed: a run fills some of it in."""


def seeds(runs: Sequence[RunRecord]) -> Html:
    """The runs that differ in their seeds alone, together: how many there are, and mean and range of what they reached.
    Nothing if there are no such runs."""
    own = [key for key in differing(runs) if key not in SEED and not key.startswith("run.")]
    groups = dict[str, list[RunRecord]]()
    for run in runs:
        plan = _flat(msgspec.to_builtins(run.plan))
        groups.setdefault("; ".join(f"{key} = {plan.get(key, '–')}" for key in own), []).append(run)
    if max(map(len, groups.values())) < 2:
        return Html("")
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.test_metrics))
    rows: list[Cells] = [
        [words or "all runs", f"{len(group)}", *(_spread(metric, group) for metric in metrics)]
        for words, group in groups.items()
    ]
    head = ["", "seeds", *map(metric_name, metrics)]
    about = element("p", "Mean over the seeds, and from the least to the most.", class_="note")
    return joined([element("h3", "Over seeds"), about, table(head, rows, "Runs over seeds", numbers=(1,))])


def _spread(metric: str, runs: Sequence[RunRecord]) -> Content:
    values = [value for run in runs if (value := run.last(metric)) is not None]
    if not values:
        return "–"
    mean, least, most = (measured(metric, value) for value in (fmean(values), min(values), max(values)))
    spread = f"{least} to {most}" if len(values) > 1 else "one seed"
    return [element("span", mean, class_="value"), element("span", spread, class_="note")]


def origin(run: RunRecord, name: str = "") -> Html:
    """Digests, versions, memory, and the commands to check, continue and repeat a run. With a name, it is a heading."""
    peak, whole = number(run.summary.get("peak_rss_mb")), "server" if run.networked else "whole process, all clients"
    facts: dict[str, Content] = {
        "folder": element("code", str(run.folder)),
        "plan": element("code", run.plan.digest().hex()),
        "trajectory": element("code", run.plan.trajectory_digest().hex()),
        "weights, sha256": element("code", one_line(str(run.summary.get("weights_sha256", "not finished")), 64)),
        "last hash of the chain": element("code", run.chain or "–"),
        "weights": f"{run.n_weights:,}",
        "made with": ", ".join(f"{one_line(k, 40)} {one_line(v, 40)}" for k, v in run.versions.items()) or "–",
        "peak memory": f"{peak:,.0f} MB, {whole}" if peak is not None else "known when the run has ended",
    }
    facts |= {what: element("code", command) for what, command in _commands(run).items()}
    listed = [(element("dt", term), element("dd", about)) for term, about in facts.items()]
    return joined([element("h3", name) if name else "", element("dl", listed, class_="facts")])


def _commands(run: RunRecord) -> dict[str, str]:
    """The commands to check, continue and repeat a run."""
    folder = shlex.quote(str(run.folder))
    plan = shlex.quote(str(run.folder / "plan.toml"))
    own_code = " --own-code" if named_by(run.plan) else ""
    told = {"check every hash": f"baffle verify {folder}"}
    if run.given:  # only the program that has the objects can continue or repeat it
        return told
    if run.state != "finished":
        served = f"baffle serve {plan} --keys SERVER_KEYS --out {folder}"
        told["go on"] = served if run.networked else f"baffle run --resume {folder}{own_code}"
    if run.plan.privacy.on:  # its noise cannot be repeated
        return told
    again = {"repeat": f"baffle run {plan} --out NEW_FOLDER"}
    return told | ({"repeat in one process": f"baffle run --as {folder}{own_code}"} if run.networked else again)
