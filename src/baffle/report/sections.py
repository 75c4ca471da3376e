"""The parts of a page, each as HTML. A live page replaces them one by one."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.errors import one_line
from baffle.plan import Plan
from baffle.report.attendance import LEFT_OUT, by_phase, refusals
from baffle.report.figures import figures_of
from baffle.report.markup import Content, Html, element, joined
from baffle.report.partition import Partition
from baffle.report.record import RunRecord
from baffle.report.series import AXES
from baffle.report.words import duration, measured, ranges

MOST_CLIENTS = 60
"""A table lists at most so many clients, those that were missing most often first."""

MOST_SETTING = 80
"""Characters of a setting that are shown."""

Cells = Sequence[Content]


def table(head: Sequence[Content], rows: Sequence[Cells], label: str, numbers: Sequence[int] = ()) -> Html:
    """A table with a heading for each row and column, in a box of its own that scrolls where the page is narrow."""

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
    """The place of a chart: its title, what it shows, the drawing, and its numbers."""
    title = element(level, chart["title"][:1].upper() + chart["title"][1:], id=f"{chart['id']}-title")
    numbers = element(
        "details",
        element("summary", f"Numbers: {chart['title']}"),
        element("div", class_="scroll", tabindex="0", role="region", aria_label=f"Numbers: {chart['title']}"),
    )
    drawing = element(
        "div",
        class_="plot low" if chart.get("stacked") else "plot",
        id=chart["id"],
        role="img",
        aria_labelledby=f"{chart['id']}-title",
    )
    caption = element("figcaption", title, element("p", chart["about"]))
    return element("figure", caption, drawing, numbers, class_="wide" if wide else None)


def named(place: int, name: str) -> Html:
    """A run's name with its colour."""
    return joined([element("span", class_=f"mark run-{place % 6}", aria_hidden="true"), name])


def state_words(run: RunRecord) -> str:
    if run.state == "finished":
        return "finished"
    if run.state == "going on":
        return f"going on, {run.rounds_done:,} of {run.plan.rounds:,} rounds"
    return f"not finished: silent for {duration(run.quiet_seconds)} when this page was made"


def overview(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    if len(runs) == 1:
        tiles = [
            element(
                "div",
                element("dt", figure.name),
                element(
                    "dd", element("span", figure.value, class_="value"), element("span", figure.note, class_="note")
                ),
                class_="first" if place == 0 else None,
            )
            for place, figure in enumerate(figures_of(runs[0]))
        ]
        return element("dl", tiles, class_="tiles")
    columns = [{figure.name: figure for figure in figures_of(run)} for run in runs]
    rows: list[Cells] = [["state", *(state_words(run) for run in runs)]]
    for label in dict.fromkeys(name for column in columns for name in column):
        cells = [column.get(label) for column in columns]
        shown = [
            [element("span", c.value, class_="value"), element("span", c.note, class_="note")] if c else "–"
            for c in cells
        ]
        rows.append([label, *shown])
    return table(["", *(named(place, name) for place, name in enumerate(names))], rows, "The runs side by side")


def key(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    """What each line of the charts means."""
    items = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        mark = f"mark run-{place % 6}"
        items.append(element("li", element("span", class_=mark, aria_hidden="true"), name))
        if run.baseline:
            label = "backpropagation" if len(runs) == 1 else f"{name}, backpropagation"
            items.append(element("li", element("span", class_=f"{mark} dash", aria_hidden="true"), label))
    if any(run.is_averaged(metric) for run in runs for metric in run.test_metrics):
        items.append(element("li", element("span", class_="mark dots", aria_hidden="true"), "without averaging"))
    return element("ul", items, class_="key")


def axis_switch(known: set[str]) -> Html:
    """What the lines are drawn against. What no run knows cannot be chosen."""
    short = {"rounds": "rounds", "forwards": "forward passes", "bytes": "bytes", "seconds": "seconds"}
    choices = [
        element(
            "label",
            element(
                "input", type="radio", name="axis", value=axis, checked=axis == "rounds", disabled=axis not in known
            ),
            element("span", short[axis]),
        )
        for axis in AXES
    ]
    return element("fieldset", element("legend", "Drawn against"), choices)


def attendance(run: RunRecord) -> Html:
    """Who took part, by client and by phase, and what was refused."""
    total = run.attendance
    ranked = sorted(
        total.by_client.items(), key=lambda item: (-item[1].get(MISSING, 0) - item[1].get(LEFT_OUT, 0), item)
    )
    listed = ranked[:MOST_CLIENTS]
    rows = [
        [f"client {client}", *(f"{ways.get(way, 0):,}" for way in (CONTRIBUTED, LEFT_OUT, MISSING))]
        for client, ways in sorted(listed)
    ]
    more = f", the {MOST_CLIENTS} that were missing most often" if len(ranked) > MOST_CLIENTS else ""
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
    rows = [[refusal.words, f"{refusal.count:,}", ranges(refusal.rounds)] for refusal in found]
    told = sum(refusal.count for refusal in found)
    left = f" Of {total - told:,} more the journal keeps only the number." if total > told else ""
    about = f"{total:,} in all, in the server’s words. A client’s own reasons are in its own log.{left}"
    return joined(
        [
            element("h4", "What was refused"),
            element("p", about, class_="note"),
            table(["what", "times", "rounds"], rows, "Refusals", numbers=(1,)),
        ]
    )


def partition_words(partition: Partition) -> Html:
    if partition.missing:
        return element("p", partition.missing)
    samples = [holding.samples for holding in partition.holdings]
    text = (
        f"{len(samples):,} clients hold {sum(samples):,} training samples: {min(samples):,} to {max(samples):,} each."
    )
    return element("p", text)


def domains(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    """The headline metrics of each domain, if the test set has domains."""
    rows: list[Cells] = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        measured_domains = next((r["test_domains"] for r in reversed(run.metrics) if "test_domains" in r), None)
        for domain, values in measured_domains.items() if isinstance(measured_domains, dict) else ():
            words = values.items() if isinstance(values, dict) else ()
            shown = ", ".join(f"{metric} {measured(metric, value)}" for metric, value in words)
            rows.append([named(place, name), one_line(str(domain), 80), shown])
    if not rows:
        return Html("")
    return joined([element("h4", "By domain"), table(["run", "domain", "measured"], rows, "Metrics of each domain")])


def settings(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    """What differs between the runs; of a single run, what differs from the defaults."""
    plans = [_flat(msgspec.to_builtins(run.plan)) for run in runs]
    default = _flat(msgspec.to_builtins(Plan()))
    keys = list(dict.fromkeys(key for plan in plans for key in plan))
    if len(runs) == 1:
        differing = [key for key in keys if plans[0].get(key) != default.get(key)]
        rows = [[key, _setting(plans[0].get(key)), _setting(default.get(key))] for key in differing]
        return table(["setting", "this run", "default"], rows, "Settings unlike the defaults")
    differing = [key for key in keys if len({plan.get(key) for plan in plans}) > 1]
    if not differing:
        return element("p", "All runs have the same settings.")
    rows = [[key, *(_setting(plan.get(key)) for plan in plans)] for key in differing]
    return table(["setting", *names], rows, "Settings that differ between the runs")


def _flat(tables: Mapping[str, Any], path: str = "") -> dict[str, str]:
    flat = dict[str, str]()
    for name, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[f"{path}{name}"] = one_line(str(value), MOST_SETTING)
    return flat


def _setting(value: str | None) -> Html:
    return element("code", "–" if value is None else value or "“”")


def origins(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    """Digests, versions, memory, and the commands to check, continue and repeat each run."""
    return joined([_origin(run, name, several=len(runs) > 1) for run, name in zip(runs, names, strict=True)])


def _origin(run: RunRecord, name: str, *, several: bool) -> Html:
    facts: dict[str, Content] = {
        "folder": element("code", str(run.folder)),
        "plan": element("code", run.plan.digest().hex()),
        "trajectory": element("code", run.plan.trajectory_digest().hex()),
        "weights, sha256": element("code", one_line(str(run.summary.get("weights_sha256", "not finished")), 64)),
        "last hash of the chain": element("code", run.chain or "–"),
        "weights": f"{run.n_weights:,}",
        "made with": ", ".join(f"{one_line(k, 40)} {one_line(v, 40)}" for k, v in run.versions.items()) or "–",
        "peak memory": _memory(run),
    }
    for what, command in commands(run).items():
        facts[what] = element("code", command)
    listed = [(element("dt", term), element("dd", about)) for term, about in facts.items()]
    return joined([element("h3", name) if several else "", element("dl", listed, class_="facts")])


def _memory(run: RunRecord) -> str:
    peak = run.summary.get("peak_rss_mb")
    if not isinstance(peak, (int, float)):
        return "known when the run has ended"
    whole = "server" if run.networked else "whole process, all clients"
    return f"{peak:,.0f} MB, {whole}"


def commands(run: RunRecord) -> dict[str, str]:
    """What to type to check, continue and repeat a run."""
    folder = shlex.quote(str(run.folder))
    plan = shlex.quote(str(run.folder / "plan.toml"))
    told = {"check every hash": f"baffle verify {folder}"}
    if run.given:  # only the program that has the objects can go on or repeat it
        return told
    if run.state != "finished" and not run.networked:
        told["go on"] = f"baffle run --resume {folder}"
    if run.state != "finished" and run.networked:
        told["go on"] = f"baffle serve {plan} --keys SERVER_KEYS --out {folder}"
    if run.plan.privacy.on:  # its noise cannot be repeated
        return told
    if run.networked:
        told["repeat in one process"] = f"baffle run --as {folder}"
    else:
        told["repeat"] = f"baffle run {plan} --out NEW_FOLDER"
    return told
