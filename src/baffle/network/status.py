"""How a run goes, in numbers: as JSON for `baffle status`, and as text for Prometheus."""

import hmac
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

MOST_CHARACTERS = 2_000  # a text in a status has at most this many characters
MOST_RANGES = 100  # a list of clients names at most this many ranges of them
RECENT, REMEMBERED = 10, 1_000  # a round's seconds are the mean of so many latest rounds, and the median of so many
PROMETHEUS = "text/plain; version=0.0.4"  # the type of a page for Prometheus

Text = Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Doing = Literal["starting", "waiting", "playing", "ending"]


@dataclass(frozen=True)
class Gauge:
    """A field's time series for Prometheus. `live`: only a server tells it, and not a run's folder."""

    help: str
    name: str = ""
    live: bool = False


class Counter(Gauge):
    """A time series that only grows."""


class Status(msgspec.Struct, frozen=True):
    """How a run goes at a moment. It holds counts and averages over clients, and nothing of a single client but its
    number. docs/operate.md says what each field means."""

    version: Text
    run: Text
    plan: Text
    secure: Text
    doing: Doing
    waits_for: Text | None = None
    uptime_seconds: Annotated[Amount, Gauge("Seconds since the server started.", live=True)] = 0.0
    rounds_done: Annotated[Count, Counter("Rounds that the journal holds.")] = 0
    rounds: Annotated[Count, Gauge("Rounds that the plan asks for.", "rounds_planned")] = 0
    skipped_rounds: Annotated[Count, Counter("Rounds without a sum.")] = 0
    recent_round_seconds: Annotated[Amount | None, Gauge(f"Mean seconds of the last {RECENT} rounds.")] = None
    median_round_seconds: Annotated[Amount | None, Gauge(f"Median seconds of the last {REMEMBERED} rounds.")] = None
    seconds_since_round: Annotated[
        Amount | None, Gauge("Seconds since the last round ended.", "since_round_seconds")
    ] = None
    clients_on_roster: Annotated[Count, Gauge("Clients that may take part.")] = 0
    clients_needed: Annotated[Count, Gauge("Clients without which the run waits.", live=True)] = 0
    clients_connected: Annotated[Count, Gauge("Clients that are connected.", live=True)] = 0
    connected: Text = ""
    clients_taking_part: Annotated[Count, Gauge("Clients that take part in the run.", live=True)] = 0
    taking_part: Text = ""
    dropouts: Annotated[Count, Counter("Replies to a round that never came.")] = 0
    silent: Annotated[
        Mapping[Text, Count], Counter("Messages that got no answer in time, by the phase of the round.")
    ] = {}
    abstained: Annotated[
        Mapping[Text, Count], Counter("Requests that clients did not follow, by the round's phase.")
    ] = {}
    refusals: Annotated[Count, Counter("Messages of clients that the secure sum or a client refused.")] = 0
    late_replies: Annotated[Count, Counter("Deadlines that clients missed.", live=True)] = 0
    refused_replies: Annotated[Count, Counter("Replies for which a client was disconnected.", live=True)] = 0
    turned_away: Annotated[Count, Counter("Connections that did not prove to be a client's.", live=True)] = 0
    uplink_bytes: Annotated[Count, Counter("Bytes of clients' messages in rounds.")] = 0
    downlink_bytes: Annotated[Count, Counter("Bytes of the server's messages in rounds.")] = 0
    received_bytes: Annotated[Count, Counter("Bytes of frames that the server received.", live=True)] = 0
    sent_bytes: Annotated[Count, Counter("Bytes of frames that the server sent.", live=True)] = 0
    loss: Annotated[
        float | None, Gauge("Mean training loss of the last round that at least two clients contributed to.")
    ] = None
    metric: Text = "accuracy"
    value: Annotated[
        float | None, Gauge("The run's first metric when it was last measured, on the test set.", "metric")
    ] = None
    accuracy: Annotated[
        Amount | None, Gauge("Test accuracy when it was last measured, from 0 to 1.", "accuracy_ratio")
    ] = None
    epsilon: Annotated[Amount | None, Gauge("Privacy loss so far.")] = None


@dataclass(frozen=True)
class LinkCounts:
    """What the link knows at a moment: which clients are connected, and its counts since the server started."""

    connected: tuple[int, ...] = ()
    late: int = 0
    refused: int = 0
    turned_away: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


def ranges(numbers: Iterable[int], most: int = MOST_RANGES) -> str:
    """Numbers in few words, those after the first few ranges as a count: 0-41, 43, and 12 more."""
    parts = list[list[int]]()
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    shown = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts[:most]]
    left_out = sum(map(len, parts[most:]))
    return ", ".join([*shown, f"and {left_out:,} more"] if left_out else shown)


# The time series of each field that has one
SERIES: dict[str, Gauge] = {
    field: series
    for field, hint in get_type_hints(Status, include_extras=True).items()
    for series in get_args(hint)
    if isinstance(series, Gauge)
}
RECORDED = frozenset(field for field, series in SERIES.items() if not series.live)


def series_name(field: str) -> str:
    series = SERIES[field]
    return series.name or (f"{field}_total" if isinstance(series, Counter) else field)


def as_metrics(status: Status, *, recorded: bool = False) -> str:
    """A status in Prometheus' text format, without what is not known; `recorded`: what a run's folder tells."""
    about = _labels({"version": status.version, "run": status.run, "plan": status.plan, "secure": status.secure})
    lines = _metric("info", "gauge", "Which run the server plays.", [(about, 1)])
    lines += _metric("waiting", "gauge", "1 while the run waits for clients.", [("", status.doing == "waiting")])
    for field, series in SERIES.items():
        if recorded and series.live:
            continue
        value = getattr(status, field)
        if isinstance(value, Mapping):
            samples = [(_labels({"phase": phase}), count) for phase, count in value.items()]
        else:
            labels = _labels({"metric": status.metric}) if field == "value" else ""
            samples = [] if value is None else [(labels, value)]
        kind = "counter" if isinstance(series, Counter) else "gauge"
        lines += _metric(series_name(field), kind, series.help, samples)
    return "".join(f"{line}\n" for line in lines)


def _metric(name: str, kind: str, what: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    lines = [f"baffle_{name}{labels} {_number(value)}" for labels, value in samples]
    return [f"# HELP baffle_{name} {what}", f"# TYPE baffle_{name} {kind}", *lines] if lines else []


def _labels(values: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{value.translate(escapes)}"' for name, value in values.items()) + "}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
    return str(int(value)) if value == int(value) else repr(value)


# The pages on the server's port: /health for everybody; /status and /metrics for the owner of the operator's token


HEALTH, STATUS, METRICS = "/health", "/status", "/metrics"


@dataclass(frozen=True)
class Pages:
    """Answers plain HTTP requests. Without `report`, which gives the run's status, or a token, only /health."""

    token: str
    report: Callable[[LinkCounts], Status] | None = None

    def answer(self, request: Request, links: LinkCounts) -> Response:
        """The page that a request asks for. `links` has the link's own numbers."""
        if request.method not in ("GET", "HEAD"):
            return NOT_FOUND
        if request.path == HEALTH:
            return _page(request, "ok\n", "text/plain")
        given, expected = request.headers.get_all("Authorization"), f"Bearer {self.token}"
        is_known = len(given) == 1 and hmac.compare_digest(given[0].encode(), expected.encode())
        is_operator = bool(self.token) and is_known
        if request.path not in (STATUS, METRICS) or self.report is None or not is_operator:
            return NOT_FOUND
        status = self.report(links)
        if request.path == STATUS:
            return _page(request, msgspec.json.encode(status).decode() + "\n", "application/json")
        return _page(request, as_metrics(status), PROMETHEUS)


def _page(request: Request, text: str, kind: str) -> Response:
    body = text.encode()
    return Response(200, "OK", _headers(len(body), kind), body if request.method == "GET" else b"")


def _headers(length: int, kind: str) -> Headers:
    about = {"Content-Length": str(length), "Content-Type": f"{kind}; charset=utf-8"}
    return Headers({"Connection": "close", **about, "Cache-Control": "no-store"})


NOT_FOUND = Response(404, "Not Found", _headers(0, "text/plain"), b"")
