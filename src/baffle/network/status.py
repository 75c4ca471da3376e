"""How a run goes, in numbers: as JSON for `baffle status`, and as text for Prometheus."""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

MOST_CHARACTERS = 2_000
"""A text in a status has at most this many characters."""

MOST_RANGES = 100
"""A list of clients names at most this many ranges of them."""

RECENT, REMEMBERED = 10, 1_000
"""Seconds a round are shown as the mean of the first number of latest rounds, and as the median of the second."""

Text = Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Doing = Literal["starting", "waiting", "playing", "ending"]


class Status(msgspec.Struct, frozen=True):
    """How a run goes at a moment. It holds counts and averages over clients, and nothing of a single client but its
    number. docs/operate.md says what each field means."""

    version: Text
    run: Text
    plan: Text
    secure: Text
    doing: Doing
    waits_for: Text | None = None
    uptime_seconds: Amount = 0.0
    rounds_done: Count = 0
    rounds: Count = 0
    skipped_rounds: Count = 0
    recent_round_seconds: Amount | None = None
    median_round_seconds: Amount | None = None
    seconds_since_round: Amount | None = None
    clients_on_roster: Count = 0
    clients_needed: Count = 0
    clients_connected: Count = 0
    connected: Text = ""
    clients_taking_part: Count = 0
    taking_part: Text = ""
    dropouts: Count = 0
    silent: Mapping[Text, Count] = {}
    abstained: Mapping[Text, Count] = {}
    refusals: Count = 0
    late_replies: Count = 0
    refused_replies: Count = 0
    turned_away: Count = 0
    uplink_bytes: Count = 0
    downlink_bytes: Count = 0
    received_bytes: Count = 0
    sent_bytes: Count = 0
    loss: float | None = None
    metric: Text = "accuracy"
    value: float | None = None
    accuracy: Amount | None = None
    epsilon: Amount | None = None


@dataclass(frozen=True)
class LinkCounts:
    """What the link knows at a moment: which clients are connected, and its counts since the server started."""

    connected: tuple[int, ...] = ()
    late: int = 0
    refused: int = 0
    turned_away: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in few words: 0-41, 43."""
    ordered = sorted(numbers)
    breaks = [place for place, (one, other) in enumerate(pairwise(ordered), 1) if other > one + 1]
    found = [ordered[start:end] for start, end in pairwise([0, *breaks, len(ordered)]) if end > start]
    shown = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in found[:MOST_RANGES]]
    left_out = sum(map(len, found[MOST_RANGES:]))
    return ", ".join([*shown, f"and {left_out:,} more"] if left_out else shown)


Sample = tuple[str, float]
"""Labels in braces, or nothing, and a value."""


@dataclass(frozen=True)
class Metric:
    """A field of a status as Prometheus knows it."""

    field: str
    name: str
    kind: Literal["gauge", "counter"]
    help: str


METRICS = (
    Metric("uptime_seconds", "uptime_seconds", "gauge", "Seconds since the server started."),
    Metric("rounds_done", "rounds_done_total", "counter", "Rounds that the journal holds."),
    Metric("rounds", "rounds_planned", "gauge", "Rounds that the plan asks for."),
    Metric("skipped_rounds", "skipped_rounds_total", "counter", "Rounds without a sum."),
    Metric("recent_round_seconds", "recent_round_seconds", "gauge", f"Mean seconds of the last {RECENT} rounds."),
    Metric("median_round_seconds", "median_round_seconds", "gauge", f"Median seconds of the last {REMEMBERED} rounds."),
    Metric("seconds_since_round", "since_round_seconds", "gauge", "Seconds since the last round ended."),
    Metric("clients_on_roster", "clients_on_roster", "gauge", "Clients that may take part."),
    Metric("clients_needed", "clients_needed", "gauge", "Clients without which the run waits."),
    Metric("clients_connected", "clients_connected", "gauge", "Clients that are connected."),
    Metric("clients_taking_part", "clients_taking_part", "gauge", "Clients that take part in the run."),
    Metric("dropouts", "dropouts_total", "counter", "Replies to a round that never came."),
    Metric("silent", "silent_total", "counter", "Messages that got no answer in time, by the phase of the round."),
    Metric("abstained", "abstained_total", "counter", "Requests that clients did not follow, by the round's phase."),
    Metric("refusals", "refusals_total", "counter", "Messages of clients that the secure sum or a client refused."),
    Metric("late_replies", "late_replies_total", "counter", "Deadlines that clients missed."),
    Metric("refused_replies", "refused_replies_total", "counter", "Replies for which a client was disconnected."),
    Metric("turned_away", "turned_away_total", "counter", "Connections that did not prove to be a client's."),
    Metric("uplink_bytes", "uplink_bytes_total", "counter", "Bytes of clients' messages in rounds."),
    Metric("downlink_bytes", "downlink_bytes_total", "counter", "Bytes of the server's messages in rounds."),
    Metric("received_bytes", "received_bytes_total", "counter", "Bytes of frames that the server received."),
    Metric("sent_bytes", "sent_bytes_total", "counter", "Bytes of frames that the server sent."),
    Metric("loss", "loss", "gauge", "Mean training loss of the last round that at least two clients contributed to."),
    Metric("accuracy", "accuracy_ratio", "gauge", "Test accuracy when it was last measured, from 0 to 1."),
    Metric("value", "metric", "gauge", "The run's first metric when it was last measured, on the test set."),
    Metric("epsilon", "epsilon", "gauge", "Privacy loss so far."),
)


def as_metrics(status: Status, only: Container[str] | None = None) -> str:
    """A status in Prometheus' text format. What is not known has no line. `only` names the fields that are."""
    about = _labels({"version": status.version, "run": status.run, "plan": status.plan, "secure": status.secure})
    lines = _metric("info", "gauge", "Which run the server plays.", [(about, 1)])
    lines += _metric("waiting", "gauge", "1 while the run waits for clients.", [("", status.doing == "waiting")])
    for metric in METRICS:
        if only is not None and metric.field not in only:
            continue
        value = getattr(status, metric.field)
        if isinstance(value, Mapping):
            samples = [(_labels({"phase": phase}), count) for phase, count in value.items()]
        else:
            labels = _labels({"metric": status.metric}) if metric.field == "value" else ""
            samples = [] if value is None else [(labels, value)]
        lines += _metric(metric.name, metric.kind, metric.help, samples)
    return "".join(f"{line}\n" for line in lines)


def _metric(name: str, kind: str, what: str, samples: Iterable[Sample]) -> list[str]:
    lines = [f"baffle_{name}{labels} {_number(value)}" for labels, value in samples]
    return [f"# HELP baffle_{name} {what}", f"# TYPE baffle_{name} {kind}", *lines] if lines else []


def _labels(values: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
    return str(int(value)) if value == int(value) else repr(value)
