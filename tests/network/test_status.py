"""A status as JSON and as Prometheus reads it; lists of clients in few words."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, strategies as st

from baffle.network.status import MOST_CHARACTERS, MOST_RANGES, SERIES, Status, as_metrics, ranges, series_name
from tests.support.prometheus import parse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate.md"


def status(**fields: Any) -> Status:
    return msgspec.structs.replace(Status("0.1", "first", "digits", "on", "playing"), **fields)


def numbers_in(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""),
        ([7], "7"),
        ([0, 1], "0-1"),
        ([*range(42), 43], "0-41, 43"),
        ([3, 1, 9, 2, 5], "1-3, 5, 9"),
        (range(1000), "0-999"),
        (range(0, 400, 2), ", ".join(map(str, range(0, 2 * MOST_RANGES, 2))) + ", and 100 more"),
    ],
)
def test_a_list_of_clients_is_short(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words
    assert ranges([1, 1, 2, 5, *range(7, 40, 2)], most=4) == "1-2, 5, 7, 9, and 15 more"


@given(st.sets(st.integers(0, 300), min_size=1, max_size=MOST_RANGES))
def test_a_list_of_clients_names_all_of_them(numbers: set[int]) -> None:
    assert numbers_in(ranges(numbers)) == numbers
    assert len(ranges(99_000 + 2 * number for number in numbers)) <= MOST_CHARACTERS


def test_every_number_of_a_status_is_a_metric() -> None:
    hints = get_type_hints(Status)
    kinds = {name: {hint, *get_args(hint)} for name, hint in hints.items()}
    numbers = {name for name, kind in kinds.items() if kind & {int, float}} | {"silent"}
    assert SERIES.keys() == numbers
    assert len({series_name(field) for field in SERIES}) == len(SERIES)


def test_metrics_say_what_the_status_says() -> None:
    """Large counts must arrive with all their digits."""
    fields = {"uplink_bytes": 123_456_789_012_345, "rounds_done": 7, "median_round_seconds": 0.125, "loss": 2.5e-7}
    shown = parse(as_metrics(status(silent={"keys": 2, "vector": 3}, doing="waiting", **fields)))
    assert shown["baffle_uplink_bytes_total"].value == 123_456_789_012_345
    assert shown["baffle_rounds_done_total"].value == 7
    assert shown["baffle_median_round_seconds"].value == 0.125
    silent = {frozenset({("phase", "keys")}): 2, frozenset({("phase", "vector")}): 3}
    assert shown["baffle_silent_total"].samples == silent
    assert shown["baffle_waiting"].value == 1
    assert shown["baffle_loss"].value == 2.5e-7
    # What is not known has no metric
    shown = parse(as_metrics(status()))
    assert not {"baffle_loss", "baffle_accuracy_ratio", "baffle_epsilon", "baffle_silent_total"} & shown.keys()
    assert shown["baffle_waiting"].value == 0


@pytest.mark.parametrize("loss", [math.inf, -math.inf, 1e300, -0.0, 5e-324])
def test_any_loss_can_be_read(loss: float) -> None:
    assert parse(as_metrics(status(loss=loss)))["baffle_loss"].value == loss
    assert math.isnan(parse(as_metrics(status(loss=math.nan)))["baffle_loss"].value)


@given(st.text(max_size=30), st.text(alphabet='\\"\nn{},= #', max_size=30))
def test_no_name_breaks_the_format(run: str, plan: str) -> None:
    (labels,) = parse(as_metrics(status(run=run, plan=plan)))["baffle_info"].samples
    assert dict(labels) == {"version": "0.1", "run": run, "plan": plan, "secure": "on"}


def test_the_docs_explain_every_number() -> None:
    """Rows of the page's table are: field, metric, meaning."""
    rows: Mapping[str, str] = dict(
        re.findall(r"^\| `(\w+)` \| (?:`baffle_(\w+?)(?:\{[^}]*\})?`|–) \|", PAGE.read_text(), re.MULTILINE)
    )
    assert rows.keys() == set(Status.__struct_fields__)
    assert {field: name for field, name in rows.items() if name not in ("", "info", "waiting")} == {
        field: series_name(field) for field in SERIES
    }
