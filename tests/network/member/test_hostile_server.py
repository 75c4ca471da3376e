"""A server that sends anything at all: every answer of a client is the constant abstention, soon and in little memory,
and its log says in one line why. Nothing ends the client."""

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from baffle.aggregation.messages import Hello
from baffle.client.abstaining import MOST_CHARACTERS, abstention
from baffle.core.messages import CatchUp, Message, RoundRequest, encode
from baffle.network.joining import UNREADY, Begin, Halt, Introduce, Introduction, Openings, Over
from baffle.network.keys.folders import ClientKeys
from baffle.network.member.equipment import with_plan
from baffle.network.member.member import Member
from baffle.plan import Plan
from baffle.statement import MOST_PLAN
from tests.support.lines_in_memory import new_keys
from tests.support.server_by_hand import ServerByHand

RUN = bytes(32)
SECONDS, BYTES = 30.0, 64 << 20
"""A refusal takes no more CPU time and memory than this. It takes less than a second; what takes time that grows with
the plan's numbers would take hours."""

MISTAKE = "a mistake in BAFFLE"

FULL = MOST_PLAN - 100
"""About as many characters as a plan may have."""

PLANS = {
    "nothing": "",
    "control characters": "\x00\x1b[2J\r\n",
    "an escape in a name": 'name = "\\u001b[2J"\nseed = "x"',
    "an unknown key with an escape": '"\\u001b[2J\\n" = 1',
    "a key that is nearly known": "round" + "s" * FULL + " = 1",
    "many keys": "".join(f"k{i} = 1\n" for i in range(22_000)),
    "many dots": "a." * (FULL // 2) + "a = 1",
    "lists in lists": "a = " + "[" * FULL,
    "tables in tables": "a = " + "{a=" * (FULL // 3),
    "a long name": 'name = "' + "x" * FULL + '"',
    "a long data set": 'task.data = "' + "\\u001b" * (FULL // 6) + '"',
    "a long number": "seed = " + "9" * FULL,
    "a model named by a number": "task.model = {name = 0x" + "f" * 10_000 + "}",
    "a huge model": 'task.model = {name = "lenet", channels = [9223372036854775807, 9223372036854775807]}',
    "an integer beyond floats": "probe.sigma = 1" + "0" * 4000,
    "sigma infinite": "probe.sigma = inf",
    "a number beyond floats": "probe.sigma = 1e400",
    "d_max tiny at epoch level": 'ring.d_max = 1e-300\nfederation = {level = "epoch", clients = 3}',
    "a date": "rounds = 1979-05-27T07:32:00Z",
    "a table for a value": "rounds = {a = 1}",
    "tiers of nothing": "federation.tiers = [{}]",
    "many tiers": "federation.tiers = [" + "{k=1,share=1e-9}," * 1_900 + "]",
    "shapes of another model": 'probe = {distribution = "outer", shapes = [[2, 3], [7]]}',
    "a shape of many dimensions": 'probe = {distribution = "outer", shapes = [['
    + "9223372036854775807," * 60_000
    + "]]}",
    "many shapes": 'probe = {distribution = "outer", shapes = [' + "[3]," * (FULL // 4 - 20) + "]}",
    "a layout that cuts a tensor": 'probe = {distribution = "outer", supports = "layers", k = 20000, '
    "layout = [" + "[0,1,0,0,1]," * 20_000 + "]}",
    "a long layout": 'probe = {supports = "units", k = 20000, layout = [' + "[0,1,0,0,1]," * 20_000 + "]}",
    "a long row": "probe.layout = [[" + "1," * (FULL // 2) + "]]",
    "a million clients and a threshold": "federation.clients = 1000000\nsecure.threshold = 5",
    "a million clients, a threshold and a lie": (
        'federation.clients = 1000000\nsecure = {threshold = 5, mode = "malicious-server"}'
    ),
    "a module": 'task.data = "os:getcwd"\nfederation.clients = 3',
    "no such data set": 'task.data = "../../etc/passwd"\nfederation.clients = 3',
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Plan]) -> ServerByHand:
    return ServerByHand(new_keys(tmp_path_factory.mktemp("keys"), 3), tiny('secure.mode="on"'))


class Victim:
    """A client with its own log."""

    def __init__(self, keys: ClientKeys, folder: Path | None = None, pinned: Plan | None = None) -> None:
        equip = with_plan(keys.number, None, part=True)
        self.log: list[str] = []
        self.member = Member(keys, folder, equip, pinned=pinned, tell=self.log.append)

    def refuses(self, data: bytes) -> str:
        """Why it abstains: one line."""
        del self.log[:]
        self.member._tell_sparingly._told.clear()  # it would not tell the same twice
        assert self.member.answer(data) == abstention(data)
        (why,) = self.log
        assert why.isprintable()
        assert len(why) <= MOST_CHARACTERS
        return why


def offers(server: ServerByHand, text: str) -> list[Message]:
    """The messages that a client reads a plan from."""
    return [introduce(server, text), begin(server, text)]


def introduce(server: ServerByHand, text: str) -> Introduce:
    return msgspec.structs.replace(server.introduce(), plan=text)


def begin(server: ServerByHand, text: str) -> Begin:
    """A statement of this plan, with the commitment of a client that has made none."""
    return Begin(encode(server.statement(2, Introduction(0, RUN, bytes(64)), plan=text)), ())


@pytest.mark.parametrize("name", PLANS)
def test_a_hostile_plan_is_refused_in_one_line(server: ServerByHand, name: str) -> None:
    """Also by a client that has a plan of its own."""
    for message, pinned in zip(offers(server, PLANS[name]), (None, server.plan), strict=True):
        victim = Victim(server.keys[2], pinned=pinned)
        data, began = encode(message), time.process_time()
        why = victim.refuses(data)
        assert time.process_time() - began < SECONDS
        assert why.startswith("will not take part: ")
        assert victim.member._client is None


@pytest.mark.parametrize("name", ["many keys", "a million clients and a threshold"])
def test_a_hostile_plan_takes_little_memory(server: ServerByHand, name: str) -> None:
    victim, data = Victim(server.keys[2], pinned=server.plan), encode(introduce(server, PLANS[name]))
    tracemalloc.start()
    try:
        victim.refuses(data)
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


def test_a_plan_beyond_the_longest_is_refused_unread(server: ServerByHand) -> None:
    victim = Victim(server.keys[2])
    for message in offers(server, "#" * 5_000_000):
        assert "expected a message of type" in victim.refuses(encode(message))


VALUES = st.sampled_from(
    [
        "0", "-1", "1", "3", "9223372036854775807", "9223372036854775808", "0x" + "f" * 5000, "1e-300", "1e308", "inf",
        "-inf", "nan", "true", '""', '"on"', '"off"', '"epoch"', '"\\u001b[2J"', '"os:getcwd"', '"mnist"', "[]", "[[]]",
        "[[0,1,0,0,1]]", "[1, 2, 3]", "{}", '{name = "custom", factory = "os:getcwd"}', '{name = "onnx"}',
        '{name = "lenet", channels = [0, 1]}', "1979-05-27", "[{k = 1, share = 1.0}]", '{name = 3}',
    ]
)  # fmt: skip

SETTINGS = st.sampled_from(
    [
        f"{table}.{name}" if table else name
        for table, names in {
            "": "name seed rounds estimator task federation probe update ring secure run",
            "task": "data pixels augment model",
            "federation": "clients participation partition alpha floor_samples level seeds batch epochs steps "
            "weighting tiers dropout",
            "probe": "k sigma scheme distribution micro_batch precision memory_mb supports layout shapes",
            "update": "optimizer rate betas momentum weight_decay clip ema norm_max",
            "ring": "d_max update_max n_max",
            "secure": "mode floor threshold groups group_seeds combine",
            "run": "model downlink workers device evaluate_every snapshot_every commit_seconds features_mb "
            "deadline_seconds",
        }.items()
        for name in names.split()
    ]
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(SETTINGS, VALUES, min_size=1, max_size=4), has_pin=st.booleans())
def test_no_plan_shows_a_mistake_of_ours(server: ServerByHand, changes: dict[str, str], has_pin: bool) -> None:
    """Whether a plan is taken or not, the client answers."""
    text = "\n".join([*(f"{name} = {value}" for name, value in {"federation.clients": "3", **changes}.items())])
    victim = Victim(server.keys[2], pinned=server.plan if has_pin else None)
    for message in offers(server, text):
        victim.member.answer(encode(message))
    assert not any(MISTAKE in words for words in victim.log), victim.log


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text() | st.text(alphabet="ab.=[]{}\"'#\n0123456789exinf-_:TZ ,\\", max_size=200))
def test_whatever_text_a_plan_is_it_is_refused(server: ServerByHand, text: str) -> None:
    victim = Victim(server.keys[2])
    for message in offers(server, text):
        assert MISTAKE not in victim.refuses(encode(message))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_bytes_come_they_are_answered(server: ServerByHand, data: st.DataObject) -> None:
    request = RoundRequest(0, RUN, RUN, RUN, CatchUp("weights", 0, ()))
    others = Openings(RUN, bytes(96)), Halt(request), Over(request), Hello(0)
    whole = [encode(message) for message in (*offers(server, server.plan.to_toml()), *others)]
    message = bytearray(data.draw(st.sampled_from(whole)))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(message[: data.draw(st.integers(0, len(message)))]) + data.draw(st.binary(max_size=9))
    victim = Victim(server.keys[2], pinned=server.plan)
    reply = victim.member.answer(damaged)
    assert reply == UNREADY or reply == abstention(damaged) or not victim.log
    assert not any(MISTAKE in words for words in victim.log), victim.log


@pytest.mark.parametrize("fault", [KeyError("k"), MemoryError(), RecursionError("deep"), ZeroDivisionError("x\ny")])
def test_a_mistake_of_ours_does_not_end_a_client_either(server: ServerByHand, fault: Exception) -> None:
    def fails(_plan: Plan, _most_weights: int = 0) -> NoReturn:
        raise fault

    victim = Victim(server.keys[2])
    begin = server.begin(victim.member)
    victim.member.consent.equip = fails
    why = victim.refuses(encode(begin))
    assert why.startswith(f"abstained: {MISTAKE}: {type(fault).__name__}")


def test_a_mistake_in_a_round_does_not_end_it(server: ServerByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = Victim(server.keys[2], pinned=server.plan)
    server.enter(victim.member)
    client = victim.member._client
    assert client is not None
    assert client.session is not None

    def fails(_first: int) -> NoReturn:
        raise KeyError("no such key")

    monkeypatch.setattr(client.session, "advertise", fails)
    assert victim.refuses(encode(Hello(3))) == f"abstained: {MISTAKE}: KeyError: 'no such key'"
