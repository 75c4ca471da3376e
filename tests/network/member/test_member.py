"""The networked client: what it takes part in, what it refuses, and what it does not forget."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from baffle.aggregation.messages import Advertisement, Hello, Turn, Turned, Unmask
from baffle.client.abstaining import abstention
from baffle.client.worker import Worker
from baffle.core.messages import Abstention, CatchUp, Message, RoundRequest, decode, encode, tag_of
from baffle.core.state import pack
from baffle.network.joining import UNREADY, Begin, Introduction, Over, Ready, Salted
from baffle.network.member.equipment import with_onnx, with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.plan import change
from baffle.statement import Statement, commitment_to, read_statement, salt_of
from tests.support.lines_in_memory import Answer, Federation
from tests.support.server_by_hand import ServerByHand

RUN = bytes(32)
OFF = 'secure.mode="off"'


@pytest.fixture
def federation(federate: Callable[..., Federation]) -> Federation:
    return federate(3)


@pytest.fixture
def server(federation: Federation) -> ServerByHand:
    return ServerByHand(federation.keys, federation.plan)


def offering(server: ServerByHand, *settings: str) -> ServerByHand:
    """A server with another plan."""
    return ServerByHand(server.keys, change(server.plan, list(settings)))


def reply(member: Member, message: Message, kind: Any) -> Any:
    return decode(member.answer(encode(message)), kind)


def refusal(member: Member, message: Message) -> str:
    """What a client's own log says about a message that it refuses. Its answer is the same for every reason."""
    return why(member, encode(message)).removeprefix("will not take part: ")


def why(member: Member, data: bytes) -> str:
    told = list[str]()
    member._tell_sparingly._told.clear()  # it would not tell the same twice
    member.tell, before = told.append, member.tell
    assert member.answer(data) == abstention(data)
    member.tell = before
    (words,) = told
    return words


def test_it_introduces_itself_and_takes_part_in_the_run(federation: Federation, server: ServerByHand) -> None:
    member = federation.member(1)
    introduction = reply(member, server.introduce(), Introduction)
    assert introduction.affords == 0
    begin = server.begin(member)
    ready = reply(member, begin, Ready)
    assert commitment_to(ready.nonce) == introduction.commitment  # it has not been opened before
    assert (ready.held, ready.answered) == (0, 0)
    assert member.answer(encode(Hello(0))) == UNREADY  # it does not know the salt yet
    statement = server.statement(1, introduction)
    openings = server.openings(1, statement, ready.nonce)
    assert reply(member, openings, Salted).salt == salt_of(openings.run, statement, openings.nonces)
    assert isinstance(reply(member, Hello(0), Advertisement), Advertisement)
    assert member._client is not None
    (epoch,) = member._client.replica.trajectory.epochs
    assert epoch.salt == salt_of(openings.run, statement, openings.nonces)


def _statement(begin: Begin) -> Statement:
    return read_statement(begin.statement)


@pytest.mark.parametrize("message", [Hello(0), Over(RoundRequest(0, RUN, RUN, RUN, CatchUp("weights", 0, ())))])
def test_a_client_that_knows_of_no_run_says_so(federation: Federation, message: Message) -> None:
    assert federation.member(0).answer(encode(message)) == UNREADY


def test_a_plan_that_shows_a_clients_values_needs_its_consent(federation: Federation, server: ServerByHand) -> None:
    shown = offering(server, OFF)
    willing = federation.member(0, pinned=shown.plan)
    begin = shown.begin(willing)
    for message in (shown.introduce(), begin):
        assert 'secure.mode is "off" in the server\'s plan' in refusal(federation.member(0), message)
    assert isinstance(reply(willing, begin, Ready), Ready)
    shown.enter(federation.member(0, policy=Policy(mode="off")))


@pytest.mark.parametrize("setting", ["probe.sigma=0.01", "ring.n_max=10", OFF])
def test_with_a_pinned_plan_it_refuses_others(federation: Federation, server: ServerByHand, setting: str) -> None:
    """Its log says what differs."""
    member = federation.member(0, pinned=server.plan)
    other = offering(server, setting)
    offered = other.begin(federation.member(0, pinned=other.plan))
    name, _, value = setting.partition("=")
    for message in (other.introduce(), offered):
        differs = f"the server's plan is another than this client's --plan: {name} is {value} there and "
        assert refusal(member, message).startswith(differs)


def test_a_pinned_plan_may_leave_open_what_the_server_settles(federation: Federation, server: ServerByHand) -> None:
    left_open = change(federation.plan, ["federation.clients=10", "rounds=7"])
    assert server.plan != left_open
    server.enter(federation.member(0, pinned=left_open))
    tiered = offering(server, "federation.tiers=[{k=2, share=0.34}]", "ring.n_max=77")
    tiered.enter(federation.member(0, pinned=left_open))


def test_it_takes_part_within_its_policy_alone(federation: Federation, server: ServerByHand) -> None:
    """It reads the plan's text when it is asked to introduce itself, and again when an epoch begins."""
    everything = offering(server, "federation.batch=0")
    generous = federation.member(0, policy=Policy(largest_batch=1.0))
    begin = everything.begin(generous)
    for message in (everything.introduce(), begin):
        assert "so a round uses all samples; largest_batch allows 0.5" in refusal(federation.member(0), message)
    everything.enter(generous, begin)
    longer = offering(server, "rounds=10001")
    begin = longer.begin(federation.member(0, policy=Policy(most_rounds=10001)))
    for message in (longer.introduce(), begin):
        assert "rounds is 10001 in the server's plan" in refusal(federation.member(0), message)


def test_a_pinned_plan_stands_for_what_it_fixes_beside_a_policy(federation: Federation, server: ServerByHand) -> None:
    bold = offering(server, "secure.floor=2", "federation.batch=0", "probe.sigma=0.5", "rounds=20000")
    pinned = federation.member(0, pinned=bold.plan)
    bold.enter(pinned)
    longer, slower = offering(bold, "rounds=20001"), offering(bold, "run.deadline_seconds=3601")
    assert "most_rounds allows at most 20000" in refusal(pinned, longer.introduce())
    assert "most_seconds allows at most 3600" in refusal(pinned, slower.introduce())
    strict = federation.member(0, pinned=bold.plan, policy=Policy(floor=3, largest_batch=1.0, sigma=(1e-6, 1.0)))
    assert refusal(strict, bold.introduce()).endswith(
        "this client's policy: secure.floor is 2 in the server's plan, floor asks for at least 3; "
        "rounds is 20000 in the server's plan, most_rounds allows at most 10000"
    )
    server.enter(federation.member(0, pinned=server.plan, policy=Policy(data=())))


def test_it_evaluates_no_more_directions_than_it_affords(federation: Federation, server: ServerByHand) -> None:
    member = federation.member(0, affords=2)
    assert reply(member, server.introduce(), Introduction).affords == 2
    begin = server.begin(member)
    assert "affords 2" in refusal(member, begin)
    server.enter(member, server.begin(member, tiers=(2, 4, 4)))
    assert member._client is not None
    assert isinstance(member._client.worker, Worker)
    assert member._client.worker.k == 2


def test_being_told_again_changes_nothing_while_it_is_in_a_run(federation: Federation, server: ServerByHand) -> None:
    """A new session would lose the keys that the other clients rely on."""
    member = federation.member(0)
    first = server.begin(member)
    server.enter(member, first)
    client = member._client
    server.enter(member, first)
    assert member._client is client
    second = server.begin(member, tiers=(3, 4, 4))
    server.enter(member, second)
    reply(member, first, Ready)
    ready = reply(member, first, Ready)
    assert "left that run" in refusal(member, server.openings(0, _statement(first), ready.nonce))


def test_a_server_that_lies_about_it_only_loses_the_client(federation: Federation, server: ServerByHand) -> None:
    """Without secure sums there are no marks to lose."""
    shown = offering(server, OFF)
    willing = federation.member(0, pinned=shown.plan)
    shown.enter(willing, shown.begin(willing, answered=3))
    member = federation.member(0)
    lie = server.begin(member, answered=2**63 - 1)
    assert "contributed to round 9223372036854775806" in refusal(member, lie)
    server.enter(member)
    client = member._client
    assert isinstance(reply(member, lie, Abstention), Abstention)
    assert member._client is client


def test_a_client_whose_copy_of_the_weights_is_damaged_replays_them(federation: Federation) -> None:
    federation.plan, lines = change(federation.plan, ["rounds=8"]), federation.lines(3)
    file = federation.folder / "client-2" / "replica"

    def restart_damaged() -> None:
        federation.members[2].close()
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        federation.come(lines, 2)

    lines.at[10] = restart_damaged
    summary = federation.serve(lines)
    assert summary["rounds"] == 8
    assert summary["skipped_rounds"] <= 3
    assert federation.told.count("client 2 takes part") == 2
    federation.require_agreement(range(3))


def test_a_client_that_is_told_another_story_takes_no_further_part_in_the_run(federation: Federation) -> None:
    """Either it is damaged, or the server tells different clients different things; it cannot know which."""
    federation.plan, federation.policy = change(federation.plan, ["secure.floor=2"]), Policy(floor=2)
    lines, log = federation.lines(3), list[str]()
    federation.members[1].tell = log.append

    def change_weights() -> None:
        client = federation.members[1]._client
        assert client is not None
        present = client.replica._present
        assert present is not None
        weights = present.state.weights.copy()
        weights[0] += 1
        client.replica._hold(replace(present, state=replace(present.state, weights=weights)), 1.0)

    lines.at[10] = change_weights
    summary = federation.serve(lines)
    assert summary["rounds"] == 6
    assert summary["skipped_rounds"] <= 1
    assert any(line.endswith("this client takes no further part in this run") for line in log)
    assert "this client has left that run" in log[-1]
    federation.require_agreement((0, 2))


def test_a_snapshot_that_nothing_proves_is_not_taken(federation: Federation, server: ServerByHand) -> None:
    shown = offering(server, OFF)
    log = list[str]()
    member = federation.member(0, pinned=shown.plan, tell=log.append)
    shown.enter(member)
    whole = CatchUp("snapshot", 3, (pack(shown.state), RUN, b""))
    request = RoundRequest(3, shown.trajectory.digest, RUN, shown.state.weights_hash(), whole)
    assert member.answer(encode(request)) == UNREADY
    assert any("a state that nothing proves" in line for line in log)
    assert log[-1].endswith("this client takes no further part in this run")


def frozen_between_messages(federation: Federation, number: int) -> Answer:
    """A client that exists only while it answers, as on a stock SuperNode."""
    kept = b""

    def answer(data: bytes) -> bytes:
        nonlocal kept
        member = federation.member(number)
        member.thaw(kept, idle=False)
        reply = member.answer(data)
        kept = b"" if member.over else member.frozen()
        return reply

    return answer


def test_a_client_that_is_frozen_between_messages_goes_on_also_in_a_new_epoch(federation: Federation) -> None:
    federation.plan, federation.policy = change(federation.plan, ["secure.floor=2"]), Policy(floor=2)
    lines = federation.lines(2)
    lines.clients[1] = frozen_between_messages(federation, 1)
    lines.at[10] = lambda: federation.come(lines, 2)
    summary = federation.serve(lines, least=2)
    assert (summary["rounds"], summary["skipped_rounds"]) == (6, 0)
    assert federation.told.count("client 1 takes part") == 2  # once in each epoch
    federation.require_agreement(range(3))


SECRET = "alices-notes"
"""A part of every path of a client's machine in the tests below."""

Trouble = Callable[[Path, pytest.MonkeyPatch], dict[str, object]]
"""Spoils something in a client's folder, and says what else is special about the client."""


def state_is_a_file(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    (folder / "state").write_text("a file")
    return {}


def data_are_damaged(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (folder / name).write_bytes(b"nonsense")
    return {"equip": with_plan(0, folder, part=False)}


def own_function_fails(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, object]:
    name = f"own_{uuid4().hex}"
    (folder / f"{name}.py").write_text("def data():\n    raise RuntimeError('no samples')\n")
    patch.syspath_prepend(str(folder))
    return {"own": f"{name}:data"}


def model_is_missing(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"equip": with_onnx(0, None, folder / "model", part=True)}


@pytest.mark.parametrize("trouble", [state_is_a_file, data_are_damaged, own_function_fails, model_is_missing])
def test_only_its_own_log_says_what_is_wrong_on_a_clients_machine(
    server: ServerByHand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Trouble
) -> None:
    folder, told = tmp_path / SECRET, list[str]()
    folder.mkdir()
    special, plan = trouble(folder, monkeypatch), server.plan
    if trouble is data_are_damaged:
        plan = change(plan, ["task.data=mnist"])
    if own := special.pop("own", None):
        plan = change(plan, [f"task.data={own}"])
    settings: dict[str, Any] = {
        "equip": with_plan(0, None, part=True),
        "pinned": plan,
        "tell": told.append,
    }
    honest = Member(server.keys[0], tmp_path / "honest", settings["equip"], tell=told.append)
    begin = server.begin(honest)
    server.plan = plan
    member = Member(server.keys[0], folder / "state", **{**settings, **special})
    statement = server.statement(0, Introduction(0, _statement(begin).commitments[0].commitment, bytes(64)))
    messages = [server.introduce(), Begin(encode(statement), ()), Hello(0)]
    replies = [member.answer(encode(message)) for message in messages for _ in range(3)]
    assert all(tag_of(reply) in ("abstention", "unready", "introduction") for reply in replies)
    assert not any(SECRET.encode() in reply for reply in replies)
    about_it = [words for words in told if SECRET in words]
    assert about_it
    assert len(about_it) == len(set(about_it))  # the server asks again and again


def test_what_it_refuses_every_round_is_told_once(federation: Federation, server: ServerByHand) -> None:
    told: list[str] = []
    member = federation.member(0, tell=told.append)
    server.enter(member)
    del told[:]
    for number in range(20):
        assert reply(member, Turn(Unmask(number, (0, 1), (2,)), None), Turned) == Turned(None, None)
    for _ in range(20):
        assert isinstance(reply(member, server.begin(member, initial=RUN), Abstention), Abstention)
    assert told[0] == "abstained: slot 0 was not opened"
    assert told[1].startswith("will not take part: the run begins with other weights")
    assert len(told) == 2
