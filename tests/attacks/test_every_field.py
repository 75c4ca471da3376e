"""Every field of a statement and a plan, changed by the server after the clients have pinned the plan: for all of them
it is refused, bounded or harmless, as fields.py says, and for one of them there is no sum. (Every field of a manifest
is in test_lying_models.py.)"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.core.arrays import I64
from baffle.core.messages import encode, tag_of
from baffle.core.ring import EXTRAS, Ring
from baffle.errors import MessageError, PlanError
from baffle.network.joining import Begin
from baffle.network.member.equipment import with_plan
from baffle.network.settling import differences
from baffle.plan import Plan, parse, settings_of
from baffle.statement import Statement
from baffle.trajectory import trajectory_of
from tests.attacks.fields import (
    BOUNDED,
    HARMLESS,
    OTHER_MODELS,
    PAGE,
    PLAN,
    REFUSED,
    STATEMENT,
    page,
    settings_of_plans,
)
from tests.attacks.hostile_server import HostileServer, RefusedError, Victims, keys_of

CLIENTS, VICTIM = 5, 2
PINNED = """
name = "pinned"
rounds = 6
task = {init = "numpy", model = {name = "lenet", channels = [2, 2], head = "flatten"}}
federation = {clients = 5, batch = 8, weighting = "uniform"}
probe = {k = 8, distribution = "outer", supports = "layers", head = "exact"}
update.moments = "layers"
secure = {mode = "malicious-server", floor = 3}
privacy = {epsilon = 8.0, clip = 2.0}
"""


def attack(folder: Path) -> HostileServer:
    server = HostileServer(Victims(folder, keys_of(folder, CLIENTS), parse(PINNED)))
    for number, member in server.victims.members.items():
        member._tell_sparingly = server.victims.logs[number].append  # type: ignore[assignment]
    return server


@pytest.fixture
def server(tmp_path: Path) -> HostileServer:
    return attack(tmp_path)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> HostileServer:
    """Only asked what its clients refuse, so that it may serve many tests."""
    return attack(tmp_path_factory.mktemp("asked"))


def with_settings(plan: Plan, settings: Mapping[str, object]) -> Plan:
    """The plan with other settings, whether it then makes sense or not."""
    table: dict[str, Any] = msgspec.to_builtins(plan)
    for key, value in settings.items():
        *sections, name = key.split(".")
        at = table
        for section in sections:
            at = at[section]
        assert at[name] != value, "nothing changes"
        at[name] = value
        if key == "task.model.name":
            table["task"]["model"] = {"name": value}
    return settings_of(table, Plan)


def lie(server: HostileServer, settings: Mapping[str, object]) -> None:
    """From now on the server offers its plan with other settings."""
    server.plan = with_settings(server.plan, settings)
    with suppress(PlanError):
        server.bare = trajectory_of(server.plan, server.bare.n)


@contextmanager
def restored(server: HostileServer) -> Iterator[list[str]]:
    """Gives the first client's log, empty. Afterwards the server offers its own plan again."""
    plan, bare, log = server.plan, server.bare, server.victims.logs[0]
    log.clear()
    try:
        yield log
    finally:
        server.plan, server.bare = plan, bare


def test_every_field_is_in_the_tables_and_the_page_has_them() -> None:
    """A new field belongs into fields.py, with what becomes of it."""
    assert set(PLAN) | set(OTHER_MODELS) == settings_of_plans()
    assert not set(PLAN) & set(OTHER_MODELS)
    assert set(STATEMENT) == set(Statement.__struct_fields__)
    text = PAGE.read_text()
    assert page(text) == text, "write it with: python -m tests.attacks.fields"


# The plan, for all clients


@pytest.mark.parametrize("key", [key for key, change in PLAN.items() if change.words or change.outcome == REFUSED])
def test_a_setting_that_is_changed_for_all_is_refused(asked: HostileServer, key: str) -> None:
    """When a client is asked to introduce itself or, if that takes its model, when it is told a statement."""
    change = PLAN[key]
    with restored(asked) as log:
        lie(asked, {key: change.value, **change.beside})
        with pytest.raises(RefusedError):
            asked.nonce(0, asked.statement(asked.introductions(asked.everybody)))
        words = (change.words,) if change.words else ("another than this client's --plan", f"{key} is ")
        assert any(all(word in line for word in words) for line in log), log


MOBILENET, CUSTOM = {"name": "mobilenet"}, {"name": "custom", "factory": "mine:model"}
OTHERS = {
    "task.model.widen": {"name": "wrn"},
    **{f"task.model.{name}": MOBILENET for name in ("weights", "trained", "scaling")},
    **{f"task.model.{name}": CUSTOM for name in ("factory", "train", "says")},
    "task.model.graph": {"name": "onnx"},
}
"""Models with the settings that the pinned one does not have."""


@pytest.mark.parametrize("key", OTHER_MODELS)
def test_a_setting_of_another_model_is_pinned_unless_it_is_left_open(key: str) -> None:
    """Whose graph runs, if the plan leaves it open, its owner approves: see test_lying_models.py."""
    model, change = OTHERS[key], OTHER_MODELS[key]
    own = settings_of(msgspec.to_builtins(parse(PINNED)) | {"task": {"model": model}}, Plan)
    other = with_settings(own, {key: change.value})
    differing = differences(own, other)
    assert differing.startswith(f"{key} is ") if "pinned" in change.why else not differing
    assert differences(other, own)  # named, it is pinned


@pytest.mark.parametrize("key", ["name", "probe.micro_batch", "probe.together", "ring.n_max", "privacy.head_factor"])
def test_a_setting_that_is_changed_for_all_does_no_harm(server: HostileServer, key: str) -> None:
    """The clients take part; the test says in which way that is harmless."""
    before = server.bare
    assert PLAN[key].outcome in (HARMLESS, BOUNDED)
    if key == "probe.together":  # ONNX Runtime refuses it
        server.victims.equip = partial(with_plan, data=None, part=True, runtime="torch")
        for number in server.everybody:
            server.victims.start(number)
    own = sent(server, server.plan)
    lie(server, {key: PLAN[key].value, **PLAN[key].beside})
    other = sent(server, server.plan)
    if key != "probe.together":
        assert server.decoded(server.play(server.begin()), CLIENTS).contributors == CLIENTS
    assert before.private is not None
    assert server.bare.private is not None
    assert server.bare.private.release == before.private.release  # what a vector costs, and so what it may tell
    step = 1 if key == "name" else 2**13  # of 2**23 in a vector as long as it may be
    if key != "privacy.head_factor":
        assert np.abs(other - own).max() < step


def sent(server: HostileServer, plan: Plan) -> I64:
    """What the victim sends in a round without salt, less its noise."""
    worker = server.victims.equip(VICTIM)(plan).worker
    seeded = replace(worker.trajectory, digest=bytes(32))  # the same directions and samples, whatever the plan says
    vector = replace(worker, random=bytes, trajectory=seeded).vector(0, server.state.weights)
    values: I64 = vector[:-EXTRAS].view(np.int32).astype(np.int64)
    return values


@given(st.integers(1, 2**26), st.integers(1, 64), st.floats(1e-3, 1e3))
def test_no_cap_on_weights_makes_a_sum_finer_than_with_uniform_weights(n_max: int, clients: int, clip: float) -> None:
    """Without noise, a server that settles ring.n_max can only round coarser what clients of weight 1 send."""
    assert Ring(clients, n_max, clip).scale <= Ring(clients, 1, clip).scale


@pytest.mark.parametrize(("key", "value"), [("privacy.noise", 5.0), ("privacy.sharers", 2)])
def test_more_noise_than_needed_is_accepted(server: HostileServer, key: str, value: float) -> None:
    lie(server, {key: value})
    assert server.decoded(server.play(server.begin()), CLIENTS).contributors == CLIENTS


# The plan, for one client


@pytest.mark.slow
@pytest.mark.parametrize("key", PLAN)
def test_no_setting_that_one_client_is_told_otherwise_gives_a_sum(server: HostileServer, key: str) -> None:
    require_no_sum_across(server, key)


@pytest.mark.parametrize("key", ["name", "probe.k", "probe.micro_batch"])
def test_no_sum_across_two_plans(server: HostileServer, key: str) -> None:
    require_no_sum_across(server, key)


def require_no_sum_across(server: HostileServer, key: str) -> None:
    """The victim is told the plan with another setting, and commits to that, if it is willing to."""
    honest = server.introductions([client for client in server.everybody if client != VICTIM])
    try:
        with restored(server):
            lie(server, {key: PLAN[key].value, **PLAN[key].beside})
            told = server.statement(honest | server.introductions([VICTIM]))
            nonce = server.nonce(VICTIM, told)
    except RefusedError:
        return
    truth = server.statement(server.introductions(server.everybody))
    nonces = b"".join(nonce if one == VICTIM else server.nonce(one, truth) for one in truth.salters)
    for client in server.everybody:
        server.enter(client, told if client == VICTIM else truth, nonces)
    with pytest.raises((RefusedError, MessageError)):
        server.decoded(server.play(server.view(truth, nonces)), CLIENTS)


# The statement


@pytest.mark.parametrize("field", STATEMENT)
def test_a_field_of_the_statement_that_is_changed_for_all_is_refused(server: HostileServer, field: str) -> None:
    """(Changed for one client, in test_lying_statements.py.)"""
    truth, log = server.statement(server.introductions(server.everybody)), server.victims.logs[0]
    values = {
        "plan": with_settings(server.plan, {"probe.sigma": 0.01}).to_toml(),
        "commitments": truth.commitments[:3],
        "unopened": (msgspec.structs.replace(truth.commitments[0], commitment=bytes(32)),),
    }
    other = values.get(field, STATEMENT[field].value)
    told = msgspec.structs.replace(truth, **{field: other})
    if field == "roster":
        assert tag_of(server.victims.members[0].answer(encode(Begin(encode(told), ())))) == "behind"
        return
    with pytest.raises(RefusedError):
        play_under(server, told)
    assert any(STATEMENT[field].words in line for line in log), log


def play_under(server: HostileServer, told: Statement) -> None:
    """Tell everybody this statement, and play a round."""
    nonces = b"".join(server.nonce(client, told) for client in server.everybody)
    for client in server.everybody:
        server.enter(client, told, nonces)
    server.play(server.view(told, nonces))
