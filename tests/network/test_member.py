"""The networked client: what it takes part in, what it refuses, and what it does not forget."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import msgspec
import pytest

from baffle.aggregation.messages import Advertisement, Hello, Turn, Turned, Unmask
from baffle.client.abstaining import abstention
from baffle.client.worker import Worker
from baffle.core.messages import Abstention, CatchUp, Message, RoundRequest, decode, encode, tag_of
from baffle.core.state import pack
from baffle.errors import RunFolderError
from baffle.export import export_plan
from baffle.network import connected, serve
from baffle.network.equipment import count_samples, with_onnx, with_plan
from baffle.network.joining import UNREADY, Begin, Introduction, Openings, Over, Ready, Salted
from baffle.network.keys import ClientKeys
from baffle.network.member import Member
from baffle.network.policy import Policy
from baffle.plan import Plan, change
from baffle.statement import Statement, commitment_to, read_statement, salt_of
from baffle.trajectory import Epoch
from tests.support.lines_in_memory import Answer, Federation, new_keys
from tests.support.server_by_hand import ServerByHand

RUN = bytes(32)
OFF = 'secure.mode="off"'


@pytest.fixture
def keys(tmp_path: Path) -> list[ClientKeys]:
    return new_keys(tmp_path, 3)


@pytest.fixture
def federation(
    keys: list[ClientKeys], tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Federation:
    monkeypatch.setattr(serve, "LOOK", 0.001)
    monkeypatch.setattr(serve, "EPOCH_SECONDS", 0.0)
    monkeypatch.setattr(connected, "AGAIN", 0.0)
    return Federation(keys, tmp_path, tiny('secure.mode="on"', "run.deadline_seconds=0.2"))


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
    assert member._client.replica.trajectory.epochs == (Epoch(0, salt_of(openings.run, statement, openings.nonces)),)


def test_nonces_that_are_not_the_committed_ones_give_no_salt(federation: Federation, server: ServerByHand) -> None:
    member = federation.member(1)
    begin = server.begin(member)
    ready = reply(member, begin, Ready)
    run = Openings(server.openings(1, _statement(begin), ready.nonce).run, bytes(96))
    assert "not those of the statement's commitments" in refusal(member, run)
    assert member.answer(encode(Openings(RUN, bytes(96)))) == UNREADY
    assert member._client is None


def _statement(begin: Begin) -> Statement:
    return read_statement(begin.statement)


def test_a_commitment_serves_until_it_is_opened_and_then_never_again(
    federation: Federation, server: ServerByHand
) -> None:
    """Otherwise a server could try statements until the salt suits it."""
    member = federation.member(0)
    first = reply(member, server.introduce(), Introduction)
    assert reply(federation.member(0), server.introduce(), Introduction).commitment == first.commitment
    member = federation.member(0)
    begin = server.begin(member)
    nonce = reply(member, begin, Ready).nonce
    other = Begin(encode(server.statement(0, first, tiers=(3, 3, 3))), ())
    for again in (member, federation.member(0)):
        assert reply(again, begin, Ready).nonce == nonce  # the same statement
        assert "has been used for another statement" in refusal(again, other)
    assert reply(member, server.introduce(), Introduction).commitment != first.commitment


@pytest.mark.parametrize("message", [Hello(0), Over(RoundRequest(0, RUN, RUN, RUN, CatchUp("weights", 0, ())))])
def test_a_client_that_knows_of_no_run_says_so(federation: Federation, message: Message) -> None:
    assert federation.member(0).answer(encode(message)) == UNREADY


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x00" * 40])
def test_what_is_no_message_is_refused(federation: Federation, server: ServerByHand, data: bytes) -> None:
    member = federation.member(0)
    server.enter(member)
    assert "expected a message of type" in why(member, data)


def test_a_plan_that_shows_a_clients_values_needs_its_consent(federation: Federation, server: ServerByHand) -> None:
    shown = offering(server, OFF)
    willing = federation.member(0, pinned=shown.plan)
    begin = shown.begin(willing)
    for message in (shown.introduce(), begin):
        assert 'secure.mode is "off" in the server\'s plan' in refusal(federation.member(0), message)
    shown.enter(federation.member(0, policy=Policy(mode="off")))
    assert isinstance(reply(willing, begin, Ready), Ready)


@pytest.mark.parametrize(
    "setting", ["probe.sigma=0.01", "seed=3", "secure.floor=2", "ring.n_max=10", "update.rate=1.0", OFF]
)
def test_a_client_with_a_pinned_plan_takes_part_in_no_other(
    federation: Federation, server: ServerByHand, setting: str
) -> None:
    """Its log says what differs."""
    member = federation.member(0, pinned=server.plan)
    other = offering(server, setting)
    offered = other.begin(federation.member(0, pinned=other.plan))
    name, _, value = setting.partition("=")
    for message in (other.introduce(), offered):
        assert refusal(member, message).startswith(
            f"the server's plan is another than this client's --plan: {name} is {value} there and "
        )


def test_a_pinned_plan_may_leave_open_what_the_server_settles(federation: Federation, server: ServerByHand) -> None:
    left_open = change(federation.plan, ["federation.clients=10", "rounds=7"])
    assert server.plan != left_open
    server.enter(federation.member(0, pinned=left_open))
    tiered = offering(server, "federation.tiers=[{k=2, share=0.34}]", "ring.n_max=77")
    tiered.enter(federation.member(0, pinned=left_open))


@pytest.mark.parametrize(
    "setting",
    [
        "task.data=os:getcwd",
        'task.model={name="custom", factory="os:getcwd"}',
        'task.loss="os:getcwd"',
        'task.metrics=["accuracy", "os:getcwd"]',
    ],
)
def test_it_calls_no_function_that_a_server_names(federation: Federation, server: ServerByHand, setting: str) -> None:
    member = federation.member(0)
    statement = _statement(server.begin(member))
    server.plan = change(server.plan, [setting])
    offered = server.statement(0, Introduction(0, statement.commitments[0].commitment, bytes(64)))
    for message in (server.introduce(), Begin(encode(offered), ())):
        assert re.search("task.data is 'os:getcwd'|function outside BAFFLE", refusal(federation.member(0), message))


def test_it_takes_part_within_its_policy_alone(federation: Federation, server: ServerByHand) -> None:
    """The rule about its samples is checked when it is asked what it brings, and again when an epoch begins."""
    everything = offering(server, "federation.batch=0")
    samples = count_samples(0, None, part=True)(everything.plan)
    generous = federation.member(0, policy=Policy(largest_batch=1.0))
    begin = everything.begin(generous)
    for message in (everything.introduce(), begin):
        assert f"a round uses {samples} of this client's {samples} samples" in refusal(federation.member(0), message)
    everything.enter(generous, begin)
    longer = offering(server, "rounds=10001")
    begin = longer.begin(federation.member(0, policy=Policy(most_rounds=10001)))
    for message in (longer.introduce(), begin):
        assert "rounds is 10001 in the server's plan" in refusal(federation.member(0), message)


def test_a_pinned_plan_stands_for_what_it_fixes_and_a_policy_beside_it_holds(
    federation: Federation, server: ServerByHand
) -> None:
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


@pytest.mark.parametrize("clients", [1, 5])
def test_it_refuses_a_run_of_another_number_of_clients(
    federation: Federation, server: ServerByHand, clients: int
) -> None:
    member = federation.member(2)
    introduction = reply(member, server.introduce(), Introduction)
    tiers = server.statement(2, introduction, tiers=(4, 4))
    assert "2 tiers, but the roster has 3" in refusal(member, Begin(encode(tiers), ()))
    server.plan = change(server.plan, [f"federation.clients={clients}", OFF])
    offered = server.statement(2, introduction)
    for message in (server.introduce(), Begin(encode(offered), ())):
        assert f"a run of {clients} clients, but the roster has 3" in refusal(member, message)


def test_it_evaluates_no_more_directions_than_it_affords(federation: Federation, server: ServerByHand) -> None:
    member = federation.member(0, affords=2)
    assert reply(member, server.introduce(), Introduction).affords == 2
    begin = server.begin(member)
    assert "affords 2" in refusal(member, begin)
    server.enter(member, server.begin(member, tiers=(2, 4, 4)))
    assert member._client is not None
    assert isinstance(member._client.worker, Worker)
    assert member._client.worker.k == 2


@pytest.mark.parametrize(("text", "says"), [("k = [", "plan"), ("surprise = 1", "unknown")])
def test_a_malformed_plan_is_refused(federation: Federation, server: ServerByHand, text: str, says: str) -> None:
    member = federation.member(0)
    introduction = reply(member, server.introduce(), Introduction)
    statement = server.statement(0, introduction, plan=text)
    assert says in refusal(member, Begin(encode(statement), ())).lower()
    assert says in refusal(federation.member(0), msgspec.structs.replace(server.introduce(), plan=text)).lower()


def test_being_told_again_changes_nothing(federation: Federation, server: ServerByHand) -> None:
    """A new session would lose the keys that the other clients rely on."""
    member = federation.member(0)
    begin = server.begin(member)
    server.enter(member, begin)
    client = member._client
    server.enter(member, begin)
    assert member._client is client


def test_marks_outlive_the_process(federation: Federation) -> None:
    """A client that was restarted still refuses a server that asks it about the same slot twice, in the same run."""
    federation.plan = change(federation.plan, ["rounds=20"])
    lines = federation.lines(3)
    refused = list[str]()

    def restart(exchange: int) -> None:
        if exchange != 12:
            return
        restarted = federation.member(1, tell=refused.append)
        lines.clients[1] = restarted.answer

    lines.before = restart
    federation.serve(lines)
    marks = federation.members[1].memory
    (run,) = marks._marks
    last = marks.marks(run).slot
    assert last == 19
    again = federation.member(1, tell=refused.append)
    assert again.memory.marks(run) == marks.marks(run)


def test_a_run_that_it_has_left_is_over_for_it(federation: Federation, server: ServerByHand) -> None:
    member = federation.member(0)
    first = server.begin(member)
    server.enter(member, first)
    second = server.begin(member, tiers=(3, 4, 4))
    server.enter(member, second)
    reply(member, first, Ready)
    ready = reply(member, first, Ready)
    assert "left that run" in refusal(member, server.openings(0, _statement(first), ready.nonce))


def test_a_client_without_its_marks_does_not_start(federation: Federation) -> None:
    """It asks for a new key: without its marks it could be asked twice."""
    federation.keys[1].marks.unlink()
    with pytest.raises(RunFolderError, match=r"marks is missing: .* put it back, or ask for a new key"):
        federation.member(1)
    federation.keys[1].marks.write_text("nonsense\n")
    with pytest.raises(RunFolderError, match="could be asked twice"):
        federation.member(1)


def test_an_older_copy_of_a_clients_marks_is_noticed_by_what_it_contributed(federation: Federation) -> None:
    federation.plan = change(federation.plan, ["rounds=12", "secure.floor=2"])
    federation.policy = Policy(floor=2)
    marks, lines, log = federation.keys[1].marks, federation.lines(3), list[str]()

    def put_back(exchange: int) -> None:
        if exchange == 16:
            data = marks.read_bytes().splitlines(keepends=True)
            early = next(index for index, line in enumerate(data) if b'"slot":1' in line)
            marks.write_bytes(b"".join(data[:early]))
            lines.clients[1] = federation.member(1, tell=log.append).answer

    lines.before = put_back
    summary = federation.serve(lines)
    assert (summary["rounds"], summary["skipped_rounds"]) == (12, 0)
    assert log[0].startswith("will not take part: this client contributed to round ")
    assert log[0].endswith("it needs a new key")
    federation.require_agreement((0, 2))


def test_a_server_that_lies_about_it_only_loses_the_client(federation: Federation, server: ServerByHand) -> None:
    member = federation.member(0)
    lie = server.begin(member, answered=2**63 - 1)
    assert "contributed to round 9223372036854775806" in refusal(member, lie)
    server.enter(member)
    client = member._client
    assert isinstance(reply(member, lie, Abstention), Abstention)
    assert member._client is client


def test_without_secure_sums_there_are_no_marks_to_lose(federation: Federation, server: ServerByHand) -> None:
    shown = offering(server, OFF)
    member = federation.member(0, pinned=shown.plan)
    shown.enter(member, shown.begin(member, answered=3))


def test_it_begins_with_its_own_weights_only(federation: Federation, server: ServerByHand) -> None:
    member = federation.member(0)
    assert "other weights than this client's own" in refusal(member, server.begin(member, initial=RUN))


@pytest.mark.parametrize("damage", ["bytes", "missing"])
def test_a_client_whose_copy_of_the_weights_is_lost_replays_them(federation: Federation, damage: str) -> None:
    federation.plan = change(federation.plan, ["rounds=10"])
    lines = federation.lines(3)
    file = federation.folder / "client-2" / "replica"

    def restart_damaged(exchange: int) -> None:
        if exchange == 14:
            federation.members[2].close()
            if damage == "bytes":
                file.write_bytes(file.read_bytes()[:-1] + b"?")
            else:
                file.unlink()
            lines.clients[2] = federation.member(2).answer

    lines.before = restart_damaged
    summary = federation.serve(lines)
    assert summary["rounds"] == 10
    assert summary["skipped_rounds"] <= 3
    assert federation.told.count("client 2 takes part") == 2
    federation.require_agreement(range(3))


def test_a_client_that_is_told_another_story_takes_no_further_part_in_the_run(federation: Federation) -> None:
    """Either it is damaged, or the server tells different clients different things; it cannot know which."""
    federation.plan = change(federation.plan, ["rounds=10", "secure.floor=2"])
    federation.policy = Policy(floor=2)
    lines, log = federation.lines(3), list[str]()
    federation.members[1].tell = log.append

    def change_weights(exchange: int) -> None:
        client = federation.members[1]._client
        if exchange == 12 and client:
            present = client.replica._present
            assert present is not None
            state = present.state
            weights = state.weights.copy()
            weights[0] += 1
            client.replica._hold(replace(present, state=replace(state, weights=weights)))

    lines.before = change_weights
    summary = federation.serve(lines)
    assert summary["rounds"] == 10
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
    federation.plan = change(federation.plan, ["rounds=10", "secure.floor=2"])
    federation.policy = Policy(floor=2)
    lines = federation.lines(2)
    lines.clients[1] = frozen_between_messages(federation, 1)

    def come(exchange: int) -> None:
        if exchange == 14:
            lines.clients[2] = federation.member(2).answer

    lines.before = come
    summary = federation.serve(lines, least=2)
    assert (summary["rounds"], summary["skipped_rounds"]) == (10, 0)
    assert federation.told.count("client 1 takes part") == 2  # once in each epoch
    federation.require_agreement(range(3))


SECRET = "alices-notes"
"""A part of every path of a client's machine in the tests below."""

Trouble = Callable[[Path, pytest.MonkeyPatch], dict[str, object]]
"""Spoils something in a client's folder, and says what else is special about the client."""


def state_is_a_file(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    (folder / "state").write_text("a file")
    return {}


def data_are_missing(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"equip": with_plan(0, folder / "nowhere", part=False)}


def data_are_damaged(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (folder / name).write_bytes(b"nonsense")
    return {"equip": with_plan(0, folder, part=False)}


def data_cannot_be_read(folder: Path, _patch: pytest.MonkeyPatch) -> dict[str, object]:
    def fails(_plan: Plan) -> NoReturn:
        raise OSError(5, "Input/output error", str(folder / "samples"))

    return {"equip": fails}


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
        data_are_missing,
        data_are_damaged,
        data_cannot_be_read,
        own_function_fails,
        own_function_is_missing,
        model_is_missing,
        pytest.param(model_is_of_another_plan, marks=pytest.mark.slow),
    ],
)
def test_only_its_own_log_says_what_is_wrong_on_a_clients_machine(
    server: ServerByHand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Trouble
) -> None:
    folder, told = tmp_path / SECRET, list[str]()
    folder.mkdir()
    special, plan = trouble(folder, monkeypatch), server.plan
    if trouble in (data_are_missing, data_are_damaged):
        plan = change(plan, ["task.data=mnist"])
    if own := special.pop("own", None):
        plan = change(plan, [f"task.data={own}"])
    settings: dict[str, Any] = {
        "samples": count_samples(0, None, part=True),
        "equip": with_plan(0, None, part=True),
        "pinned": plan,
        "tell": told.append,
    }
    honest = Member(server.keys[0], tmp_path / "honest", settings["samples"], settings["equip"], tell=told.append)
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


def test_a_server_counts_a_client_that_abstains_and_learns_no_more(federation: Federation) -> None:
    """For some rounds its marks cannot be written. The others go on, and later it is back."""
    federation.plan = change(federation.plan, ["rounds=8", "secure.floor=2"])
    federation.policy = Policy(floor=2)
    lines, told, replies = federation.lines(3), list[str](), list[bytes]()
    troubled, marks = federation.members[2], federation.keys[2].marks
    troubled.tell = told.append

    def hinder(exchange: int) -> None:
        if exchange == 12:
            marks.rename(marks.with_name("saved"))
            marks.mkdir()
        elif exchange == 18:
            marks.rmdir()
            marks.with_name("saved").rename(marks)

    def answer(data: bytes) -> bytes:
        replies.append(troubled.answer(data))
        return replies[-1]

    lines.before, lines.clients[2] = hinder, answer
    summary = federation.serve(lines)
    metrics = (federation.run / "metrics.jsonl").read_text()
    refused = [why for line in metrics.splitlines() for why in json.loads(line).get("refused", [])]
    assert summary["refusals"] == len(refused) > 0
    assert summary["skipped_rounds"] == 0
    folder = str(federation.folder)
    assert folder not in metrics
    assert not any(folder in line for line in federation.told)
    assert not any(folder.encode() in reply for reply in replies)
    (reason,) = (words for words in told if folder in words)
    assert "marks cannot be written" in reason
    federation.require_agreement(range(3))


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
