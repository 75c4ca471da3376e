"""The fuzzer finds nothing wrong, in some thousand messages; and it would find what is wrong."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import msgspec
import pytest
from fuzzing.checks import ACCEPTED, REFUSED, Target, clone, tried
from fuzzing.damage import Mutations, written
from fuzzing.texts import damaged_text

from baffle.aggregation.client.marks import Marks, Memory
from baffle.core.messages import encode
from baffle.errors import MessageError
from baffle.network.joining import Begin, Ready

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

ALL = ("stranger", "line", "caller", "member", "run", "sum", "plan", "roster", "file", "journal")


def fuzz(*arguments: str) -> dict[str, Any]:
    """The fuzzer's results, as another process prints them."""
    command = [sys.executable, str(BENCHMARKS / "fuzz_messages.py"), "--json", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=600)
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(result["violations"])
    return result


def test_more_than_a_thousand_malformed_messages_do_no_harm_anywhere() -> None:
    result = fuzz("--count", "1100", "--seed", "1")
    assert result["violations"] == {}
    assert tuple(result["areas"]) == ALL
    assert all(area["messages"] >= area["planned"] for area in result["areas"].values())


@pytest.mark.slow
def test_many_malformed_messages_do_no_harm_anywhere() -> None:
    result = fuzz("--count", "40000", "--seed", "2")
    assert result["violations"] == {}
    outcomes = result["outcomes"]
    for phase in ("keys", "share", "vector", "agree", "unmask"):
        assert outcomes[f"client before {phase}"]["refused"] > 100
        assert outcomes[f"collect, {phase}"]
    for phase in ("share", "vector", "agree", "unmask"):
        assert outcomes[f"server in {phase}"]["refused"] > 100
    for asked in ("introduce", "begin", "openings", "over", "request", "hello", "turn", "agree"):
        assert outcomes[f"line, {asked}"]["refused"] > 20
        if asked not in ("agree", "hello"):
            assert outcomes[f"member before {asked}"]["refused"] > 20
    for asked in ("introduce", "begin", "openings", "halt"):
        assert outcomes[f"line, {asked} while an epoch is formed"]
    for way in ("bytes", "cells", "tables", "plan"):
        assert outcomes[f"journal, {way}"]["refused"] > 1
    assert result["areas"]["stranger"]["messages"] == 400


def raising(fault: BaseException) -> Callable[[], NoReturn]:
    def act() -> NoReturn:
        raise fault

    return act


def test_only_our_own_errors_are_refusals() -> None:
    assert tried("x", b"", lambda: False, 1).outcome == ACCEPTED
    assert tried("x", b"", lambda: True, 1).outcome == REFUSED
    assert tried("x", b"", raising(MessageError("no")), 1).outcome == REFUSED
    for fault in (KeyError("k"), RecursionError(), MemoryError(), UnicodeDecodeError("utf-8", b"", 0, 1, "no")):
        outcome = tried("x", b"", raising(fault), 1).outcome
        assert outcome.startswith(f"VIOLATION x: {type(fault).__name__} at test_fuzzing.py")


def test_a_refusal_that_takes_long_and_what_never_ends_are_found() -> None:
    def waits() -> bool:
        time.sleep(60)
        return True

    for took, words in ((0.9, REFUSED), (1.1, "took more than 1 s")):
        times = iter((5.0, 5.0 + took))
        assert words in tried("x", b"", lambda: True, 1.0, lambda: next(times)).outcome  # noqa: B023
    began = time.monotonic()
    outcome = tried("x", b"", waits, 0.002).outcome
    assert outcome.startswith("VIOLATION x: TooSlowError")
    assert time.monotonic() - began < 30


def test_a_refused_message_that_changed_something_is_found_and_what_changed_is_restored() -> None:
    def feed(memory: Memory, data: bytes) -> bool:
        if data:
            memory.remember(bytes(32), Marks(slot=memory.marks(bytes(32)).slot + 1))
        return data != b"take"

    memory = Memory()
    first, second = clone([memory, memory])
    assert first is second is not memory  # a copy keeps what is shared, and shares nothing else
    target = Target("memory", Memory(), [], feed)
    assert target.take(b"").outcome == REFUSED
    for _ in range(2):
        assert target.take(b"x").outcome.endswith("a message that was refused changed _marks")
        assert target.take(b"take").outcome == ACCEPTED
    allowed = Target("memory", Memory(), [], feed, may_change=lambda _data, name: name == "_marks")
    assert allowed.take(b"x").outcome == REFUSED


def test_messages_inside_messages_and_plans_inside_those_are_damaged() -> None:
    statement = ["statement", 2, 'rounds = 1\nname = "x"\n', bytes(32), [1, 2]]
    sound = encode(Begin(written(statement), ()))
    mutations = Mutations(Random(0), [sound, encode(Ready(bytes(32), bytes(64), 0, 0))])
    other_plans, other_statements = set(), set()
    for _ in range(3000):
        try:
            tag, inner, *_rest = msgspec.msgpack.decode(mutations.of(sound))
            name, _, plan, *_fields = msgspec.msgpack.decode(inner)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            continue
        if (tag, name) == ("begin", "statement"):
            other_statements.add(bytes(inner))
            other_plans.add(plan if isinstance(plan, str) else "")
    assert len(other_statements) > 100
    assert len(other_plans) > 50
    one, other = ([again.of(sound) for _ in range(200)] for again in (Mutations(Random(4), [sound]) for _ in "ab"))
    assert one == other
    assert damaged_text(Random(4), "a = 1\nb = 2") == damaged_text(Random(4), "a = 1\nb = 2")
