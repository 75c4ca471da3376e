"""The networked client: what it takes part in, what it refuses, and what it does not forget."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import pytest

from baffle.aggregation.messages import Advertisement, Hello, Turn, Turned, Unmask
from baffle.client.abstaining import abstention
from baffle.client.replica import Replica
from baffle.core.messages import Abstention, CatchUp, Message, RoundRequest, decode, encode, read
from baffle.core.state import pack
from baffle.export import export_plan
from baffle.network import joining, serve
from baffle.network.equipment import count_samples, with_onnx, with_torch
from baffle.network.joining import UNREADY, Begin, Introduce, Introduction, Over, Ready
from baffle.network.keys import ClientKeys
from baffle.network.member import FrozenMember, Member
from baffle.network.policy import Policy
from baffle.network.settling import read_settled
from baffle.plan import Plan, change, parse
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of
from tests.support.lines_in_memory import Federation, new_keys

RUN = bytes(32)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[ClientKeys]:
    return new_keys(tmp_path_factory.mktemp("keys"), 3)


@pytest.fixture
def federation(
    keys: list[ClientKeys], tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Federation:
    monkeypatch.setattr(serve, "LOOK", 0.001)
    monkeypatch.setattr(joining, "AGAIN", 0.0)
    return Federation(keys, tmp_path, tiny('secure.mode="on"', "run.deadline_seconds=0.2"))


@pytest.fixture
def plan(federation: Federation) -> Plan:
    """The plan as a server settles it."""
    return load_task(federation.plan).plan


def ask(member: Member, message: Message) -> Message:
    kinds = Introduction | Ready | joining.Done | joining.Unready | Abstention | Advertisement | Turned
    reply: Message = read(member.answer(encode(message)), kinds, "an answer")
    return reply


def begin(plan: Plan, tiers: tuple[int, ...] = (4, 4, 4)) -> Begin:
    return Begin(RUN, plan.to_toml(), tiers)


def refusal(member: Member, message: Message) -> str:
    """Why a member abstains, from its own log. Its answer is the same for every reason."""
    return why(member, encode(message))


def why(member: Member, data: bytes) -> str:
    told, tell = list[str](), member.tell
    member._tell_sparingly._told.clear()  # it would not tell the same twice
    member.tell = told.append
    assert member.answer(data) == abstention(data)
    member.tell = tell
    (words,) = told
    return words


def test_it_introduces_itself_and_takes_part_in_the_run(federation: Federation, plan: Plan) -> None:
    member = federation.member(1)
    introduction = ask(member, Introduce(RUN, plan.to_toml()))
    assert isinstance(introduction, Introduction)
    shares = load_task(plan).shares
    assert (introduction.samples, introduction.held) == (len(shares[1]), 0)
    assert ask(member, begin(plan)) == Ready(plan.trajectory_digest())
    assert isinstance(ask(member, Hello(0)), Advertisement)


@pytest.mark.parametrize("message", [Hello(0), Over(RoundRequest(0, 0, RUN, RUN, CatchUp("weights", 0, ())))])
def test_a_client_that_knows_of_no_run_says_so(federation: Federation, message: Message) -> None:
    assert federation.member(0).answer(encode(message)) == UNREADY


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x00" * 40])
def test_what_is_no_message_is_refused(federation: Federation, plan: Plan, data: bytes) -> None:
    member = federation.member(0)
    ask(member, begin(plan))
    assert "expected a message of type" in why(member, data)


def test_a_plan_that_shows_a_clients_values_needs_its_consent(federation: Federation, plan: Plan) -> None:
    shown = change(plan, ['secure.mode="off"'])
    for message in (Introduce(RUN, shown.to_toml()), begin(shown)):
        assert 'secure.mode is "off" in the server\'s plan' in refusal(federation.member(0), message)
    assert isinstance(ask(federation.member(0, policy=Policy(mode="off")), begin(shown)), Ready)
    assert isinstance(ask(federation.member(0, pinned=shown), begin(shown)), Ready)


@pytest.mark.parametrize(
    "setting", ["probe.sigma=0.01", "seed=3", "secure.floor=2", "ring.n_max=10", "update.rate=1.0", 'secure.mode="off"']
)
def test_a_client_with_a_pinned_plan_takes_part_in_no_other(federation: Federation, plan: Plan, setting: str) -> None:
    """Its log says what differs."""
    member = federation.member(0, pinned=plan)
    other = change(plan, [setting])
    name, _, value = setting.partition("=")
    for message in (Introduce(RUN, other.to_toml()), begin(other)):
        assert refusal(member, message).startswith(
            f"will not take part: the server's plan is another than this client's --plan: {name} is {value} there and "
        )


def test_a_pinned_plan_may_leave_open_what_the_server_settles(federation: Federation, plan: Plan) -> None:
    left_open = change(federation.plan, ["federation.clients=10", "rounds=7"])
    assert plan != left_open
    assert isinstance(ask(federation.member(0, pinned=left_open), begin(plan)), Ready)
    tiered = change(plan, ["federation.tiers=[{k=2, share=0.34}]", "ring.n_max=77"])
    assert isinstance(ask(federation.member(0, pinned=left_open), begin(tiered, (2, 4, 4))), Ready)


@pytest.mark.parametrize("setting", ["task.data=os:getcwd", 'task.model={name="custom", factory="os:getcwd"}'])
def test_it_calls_no_function_that_a_server_names(federation: Federation, plan: Plan, setting: str) -> None:
    offered = change(plan, [setting])
    for message in (Introduce(RUN, offered.to_toml()), begin(offered)):
        assert re.search("task.data is 'os:getcwd'|function outside BAFFLE", refusal(federation.member(0), message))


def test_it_takes_part_within_its_policy_alone(federation: Federation, plan: Plan) -> None:
    """The rule about its samples is checked when it is asked what it brings, and again when the run begins."""
    everything = change(plan, ["federation.batch=0"])
    samples = len(load_task(plan).shares[0])
    for message in (Introduce(RUN, everything.to_toml()), begin(everything)):
        assert f"a round uses {samples} of this client's {samples} samples" in refusal(federation.member(0), message)
        assert federation.member(0)._client is None
        generous = federation.member(0, policy=Policy(largest_batch=1.0))
        assert not isinstance(ask(generous, message), Abstention)
    longer = change(plan, ["rounds=10001"])
    assert "rounds is 10001 in the server's plan" in refusal(federation.member(0), begin(longer))


def test_a_pinned_plan_stands_for_what_it_fixes_and_a_policy_beside_it_holds(
    federation: Federation, plan: Plan
) -> None:
    bold = change(plan, ["secure.floor=2", "federation.batch=0", "probe.sigma=0.5", "rounds=20000"])
    assert isinstance(ask(federation.member(0, pinned=bold), begin(bold)), Ready)
    longer, slower = change(bold, ["rounds=20001"]), change(bold, ["run.deadline_seconds=3601"])
    assert "most_rounds allows at most 20000" in refusal(federation.member(0, pinned=bold), begin(longer))
    assert "most_seconds allows at most 3600" in refusal(federation.member(0, pinned=bold), begin(slower))
    strict = federation.member(0, pinned=bold, policy=Policy(floor=3, largest_batch=1.0, sigma=(1e-6, 1.0)))
    assert refusal(strict, begin(bold)).endswith(
        "this client's policy: secure.floor is 2 in the server's plan, floor asks for at least 3; "
        "rounds is 20000 in the server's plan, most_rounds allows at most 10000"
    )
    other = federation.member(0, pinned=plan, policy=Policy(data=()))
    assert isinstance(ask(other, begin(plan)), Ready)


def test_it_refuses_another_number_of_clients_and_more_directions_than_it_affords(
    federation: Federation, plan: Plan
) -> None:
    assert "2 tiers, but the roster has 3" in refusal(federation.member(0), begin(plan, (4, 4)))
    for other in (1, 5):
        offered = change(plan, [f"federation.clients={other}", "secure.mode=off"])
        for message in (Introduce(RUN, offered.to_toml()), begin(offered, (4,) * other)):
            assert f"a run of {other} clients, but the roster has 3" in refusal(federation.member(2), message)
    assert "affords 2" in refusal(federation.member(0, affords=2), begin(plan))
    assert isinstance(ask(federation.member(0, affords=2), begin(plan, (2, 4, 4))), Ready)


def test_a_malformed_plan_is_refused(federation: Federation) -> None:
    assert "plan" in refusal(federation.member(0), Introduce(RUN, "k = ["))
    assert "unknown" in refusal(federation.member(0), Introduce(RUN, "surprise = 1")).lower()


def test_being_told_again_changes_nothing(federation: Federation, plan: Plan) -> None:
    """A new session would lose the keys that the other clients rely on."""
    member = federation.member(0)
    ask(member, begin(plan))
    client = member._client
    assert isinstance(ask(member, begin(plan)), Ready)
    assert member._client is client


def test_a_run_that_goes_on_keeps_its_session_and_everything_that_guards_it(federation: Federation, plan: Plan) -> None:
    member = federation.member(0)
    ask(member, begin(plan))
    client, longer = member._client, change(plan, ["rounds=9", "run.evaluate_every=1"])
    for weaker in (change(longer, ["secure.floor=2"]), change(longer, ["secure.mode=off"])):
        assert refusal(member, begin(weaker))
    assert "keeps them" in refusal(member, begin(longer, (4, 4, 3)))
    assert parse(decode(member.frozen(), FrozenMember).begun.plan).rounds == plan.rounds
    assert isinstance(ask(member, begin(longer)), Ready)
    assert member._client is client
    assert parse(decode(member.frozen(), FrozenMember).begun.plan).rounds == 9


def test_marks_outlive_the_process(federation: Federation) -> None:
    """A client that was restarted still refuses a server that asks it about the same slot twice."""
    federation.serve(federation.lines(3))
    message = begin(load_task(federation.plan).plan)
    run = bytes.fromhex(read_settled(federation.run).run)
    for _ in range(2):
        restarted = federation.member(1)
        assert isinstance(ask(restarted, Begin(run, message.plan, message.tiers)), Ready)
        for slot in range(6):
            assert "is not after slot 5" in refusal(restarted, Hello(slot))
        assert isinstance(ask(restarted, Hello(6)), Advertisement)
    in_another_run = federation.member(1)
    assert isinstance(ask(in_another_run, message), Ready)
    assert isinstance(ask(in_another_run, Hello(0)), Advertisement)


def begin_again(federation: Federation, plan: Plan, answered: int) -> Begin:
    """How a server tells a client about the run again that it has played."""
    return Begin(bytes.fromhex(read_settled(federation.run).run), plan.to_toml(), (4, 4, 4), answered)


def test_a_client_that_has_lost_its_state_refuses_to_go_on(federation: Federation) -> None:
    """Without its marks it would answer rounds again that it has answered. The server names it."""
    federation.plan = change(federation.plan, ["federation.clients=3", "rounds=3", "secure.floor=2"])
    federation.policy = Policy(floor=2)
    federation.serve(federation.lines(3))
    shutil.rmtree(federation.folder / "client-1")
    federation.plan = change(federation.plan, ["rounds=5"])
    log = list[str]()
    lines = federation.lines(3)
    lines.clients[1] = federation.member(1, tell=log.append).answer
    summary = federation.serve(lines)
    assert (summary["rounds"], summary["skipped_rounds"]) == (5, 0)
    reason = (
        "this client contributed to round 2, but its state folder has no mark of it, so it was lost or is an older copy"
    )
    assert federation.said("client 1 does not take part: it abstained; its own log says why")
    assert federation.told.count("client 1 takes part") == 1  # before it lost its state
    (said,) = log
    assert said.startswith(f"will not take part: {reason}")
    assert said.endswith("put the right folder back, or wait for the next run")
    federation.require_agreement((0, 2))


def test_an_older_copy_of_a_clients_state_is_refused_too(federation: Federation) -> None:
    federation.serve(federation.lines(3))
    plan = load_task(federation.plan).plan
    (marks,) = (federation.folder / "client-1").glob("*/marks.jsonl")
    lines = marks.read_bytes().splitlines(keepends=True)
    assert isinstance(ask(federation.member(1), begin_again(federation, plan, answered=6)), Ready)
    last = next(i for i, line in enumerate(lines) if b'"slot":5' in line)
    marks.write_bytes(b"".join(lines[:last]))
    for member in (federation.member(1), federation.member(1)):
        assert "contributed to round 5" in refusal(member, begin_again(federation, plan, answered=6))
    assert isinstance(ask(federation.member(1), begin_again(federation, plan, answered=5)), Ready)


def test_a_server_that_lies_about_it_only_loses_the_client(federation: Federation, plan: Plan) -> None:
    member = federation.member(0)
    lie = Begin(RUN, plan.to_toml(), (4, 4, 4), 2**63 - 1)
    assert "contributed to round 9223372036854775806" in refusal(member, lie)
    assert isinstance(ask(member, begin(plan)), Ready)
    client = member._client
    assert "contributed to round" in refusal(member, lie)
    assert member._client is client
    assert isinstance(ask(member, begin(plan)), Ready)


def test_without_secure_sums_there_are_no_marks_to_lose(federation: Federation, plan: Plan) -> None:
    shown = change(plan, ['secure.mode="off"'])
    asked = Begin(RUN, shown.to_toml(), (4, 4, 4), 3)
    assert isinstance(ask(federation.member(0, pinned=shown), asked), Ready)


def test_damaged_marks_keep_a_client_out(federation: Federation, plan: Plan) -> None:
    folder = federation.folder / "client-0" / RUN.hex()[:16]
    folder.mkdir(parents=True)
    (folder / "marks.jsonl").write_text("nonsense\n")
    assert "could be asked twice" in refusal(federation.member(0), begin(plan))


@pytest.mark.parametrize("damage", ["bytes", "missing", "other weights"])
def test_a_client_with_a_damaged_replica_gets_the_weights_whole(federation: Federation, damage: str) -> None:
    """The hash gives the damage away, and the client is back two rounds later."""
    federation.plan = change(federation.plan, ["rounds=10"])
    lines = federation.lines(3)

    def restart_damaged(exchange: int) -> None:
        if exchange == 12:
            damage_replica(federation, damage)
            lines.clients[2] = federation.member(2).answer

    lines.before = restart_damaged
    summary = federation.serve(lines)
    assert summary["rounds"] == 10
    assert summary["skipped_rounds"] <= 3
    federation.require_agreement(range(3))


def damage_replica(federation: Federation, damage: str) -> None:
    """Damage what client 2 has saved."""
    federation.members[2].close()
    client = federation.members[2]._client
    assert client is not None
    file = client.replica._file
    assert file is not None
    match damage:
        case "bytes":
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        case "missing":
            file.unlink()
        case _:
            state = client.replica._held.state
            assert state is not None
            state.weights.flags.writeable = True
            state.weights[0] += 1
            client.replica.save()


def test_a_replica_that_went_astray_is_replaced_while_the_client_lives(federation: Federation) -> None:
    lines = federation.lines(3)
    federation.members[1].tell = federation.told.append

    def lose_state(exchange: int) -> None:
        client = federation.members[1]._client
        if exchange == 10 and client:
            held = client.replica._held
            client.replica._held = held._replace(state=Replica(client.replica.trajectory)._held.state)

    lines.before = lose_state
    federation.serve(lines)
    assert federation.said("asks for them whole")
    federation.require_agreement(range(3))


def test_a_server_whose_snapshot_is_wrong_is_refused(federation: Federation, plan: Plan) -> None:
    """Such a server lies or is damaged, so asking it again would not help."""
    member = federation.member(0, pinned=change(plan, ['secure.mode="off"']))
    shown = change(plan, ['secure.mode="off"'])
    assert isinstance(ask(member, begin(shown)), Ready)
    task = load_task(shown)
    trajectory = trajectory_of(task.plan, len(task.initial_weights()))
    whole = CatchUp("snapshot", 0, (pack(trajectory.rule.start(task.initial_weights())),))
    request = RoundRequest(0, 0, trajectory.digest, bytes(32), whole)
    assert "not the ones that the server names" in refusal(member, request)


SECRET = "alices-notes"
"""A part of every path of a client's machine in the tests below."""

Trouble = Callable[[Path, pytest.MonkeyPatch], dict[str, object]]
"""Spoils something in a client's folder, and says what else is special about the client."""


def state_is_a_file(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    (folder / "state").write_text("a file")
    return {}


def marks_are_damaged(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    run = folder / "state" / RUN.hex()[:16]
    run.mkdir(parents=True)
    (run / "marks.jsonl").write_text("nonsense\n")
    return {}


def data_are_missing(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"samples": count_samples(0, folder / "nowhere", part=False)}


def data_are_missing_later(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"samples": lambda _plan: 10, "equip": with_torch(0, folder / "nowhere", part=False)}


def data_are_damaged(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (folder / name).write_bytes(b"nonsense")
    return {"samples": count_samples(0, folder, part=False)}


def data_cannot_be_read(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    def fails(_plan: Plan) -> NoReturn:
        raise OSError(5, "Input/output error", str(folder / "samples"))

    return {"samples": fails}


def own_function_fails(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, object]:
    name = f"own_{uuid4().hex}"
    (folder / f"{name}.py").write_text("def data():\n    raise RuntimeError('no samples')\n")
    patch.syspath_prepend(str(folder))
    return {"own": f"{name}:data"}


def own_function_is_missing(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, object]:
    patch.syspath_prepend(str(folder))
    return {"own": "no_such_module:data"}


def model_is_missing(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"equip": with_onnx(0, None, folder / "model", part=True)}


def model_is_of_another_plan(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    export_plan("digits", folder / "model", ["federation.clients=3"])
    return {"equip": with_onnx(0, None, folder / "model", part=True)}


@pytest.mark.parametrize(
    "trouble",
    [
        state_is_a_file,
        marks_are_damaged,
        data_are_missing,
        data_are_missing_later,
        data_are_damaged,
        data_cannot_be_read,
        own_function_fails,
        own_function_is_missing,
        model_is_missing,
        pytest.param(model_is_of_another_plan, marks=pytest.mark.slow),
    ],
)
def test_only_its_own_log_says_what_is_wrong_on_a_clients_machine(
    keys: list[ClientKeys], plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Trouble
) -> None:
    folder, told = tmp_path / SECRET, list[str]()
    folder.mkdir()
    special = trouble(folder, monkeypatch)
    if trouble in (data_are_missing, data_are_missing_later, data_are_damaged):
        plan = change(plan, ["task.data=mnist"])
    if own := special.pop("own", None):
        plan = change(plan, [f"task.data={own}"])
    settings: dict[str, Any] = {
        "samples": count_samples(0, None, part=True),
        "equip": with_torch(0, None, part=True),
        "pinned": plan,
        "tell": told.append,
    }
    member = Member(keys[0], folder / "state", **{**settings, **special})
    messages = [Introduce(RUN, plan.to_toml()), begin(plan), Hello(0)]
    replies = [member.answer(encode(message)) for message in messages for _ in range(3)]
    assert any(reply == abstention(encode(message)) for reply, message in zip(replies[::3], messages, strict=True))
    assert not any(SECRET.encode() in reply for reply in replies)
    about_it = [words for words in told if SECRET in words]
    assert about_it
    assert len(about_it) == len(set(about_it))  # the server asks again and again


def test_a_server_counts_a_client_that_abstains_and_learns_no_more(federation: Federation) -> None:
    """For some rounds its marks cannot be written. The others go on, and later it is back."""
    federation.plan = change(federation.plan, ["rounds=8", "secure.floor=2"])
    federation.policy = Policy(floor=2)
    federation.folder = federation.folder / SECRET
    federation.folder.mkdir()
    lines, told, replies = federation.lines(3), list[str](), list[bytes]()
    troubled = federation.members[2]
    troubled.tell = told.append

    def hinder(exchange: int) -> None:
        if exchange == 8:
            (marks,) = federation.folder.glob("client-2/*/marks.jsonl")
            marks.rename(marks.with_name("saved"))
            marks.mkdir()
        elif exchange == 14:
            (saved,) = federation.folder.glob("client-2/*/saved")
            saved.with_name("marks.jsonl").rmdir()
            saved.rename(saved.with_name("marks.jsonl"))

    def answer(data: bytes) -> bytes:
        replies.append(troubled.answer(data))
        return replies[-1]

    lines.before, lines.clients[2] = hinder, answer
    summary = federation.serve(lines)
    metrics = (federation.run / "metrics.jsonl").read_text()
    refused = [why for line in metrics.splitlines() for why in json.loads(line).get("refused", [])]
    assert set(refused) == {"client 2: abstained"}
    assert summary["refusals"] == len(refused)
    assert sum(sum(json.loads(line).get("abstained", {}).values()) for line in metrics.splitlines()) == len(refused)
    assert summary["skipped_rounds"] == 0
    assert SECRET not in metrics
    assert not any(SECRET in line for line in federation.told)
    assert not any(SECRET.encode() in reply for reply in replies)
    (reason,) = (words for words in told if SECRET in words)
    assert "marks.jsonl cannot be written" in reason
    federation.require_agreement(range(3))


def test_what_it_refuses_every_round_is_told_once(federation: Federation, plan: Plan) -> None:
    told: list[str] = []
    member = federation.member(0, tell=told.append)
    ask(member, begin(plan))
    del told[:]
    for number in range(20):
        assert ask(member, Turn(Unmask(number, (0, 1), (2,)), None)) == Turned(None, None)
    for _ in range(20):
        assert isinstance(ask(member, begin(change(plan, ["federation.clients=5"]), (4,) * 5)), Abstention)
    assert told[0] == "abstained: slot 0 was not opened"
    assert told[1].startswith("will not take part: a run of 5 clients")
    assert len(told) == 2
