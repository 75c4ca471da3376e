"""Questions that cost a server or a stranger nothing: they cost a client nothing either, and tell nothing about it."""

import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baffle.client.abstaining import abstention
from baffle.core.messages import CatchUp, Message, Outcome, encode, tag_of
from baffle.core.ring import EXTRAS
from baffle.network.joining import Begin, Halt, Introduce
from baffle.network.keys.folders import ClientKeys
from baffle.network.link.server import REFUSAL_PAUSE
from baffle.network.member.equipment import Equipment, with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.server import serve
from baffle.plan import Plan, change
from baffle.plan.sections import LARGEST
from baffle.server.round import MOST_REFUSALS
from tests.attacks.hostile_server import HostileServer, refused
from tests.support.lines_in_memory import Answer, Federation, new_keys
from tests.support.links import dial, linked, new_keys as new_links_keys
from tests.support.memory import at_most
from tests.support.server_by_hand import ServerByHand

HUGE = 'task.model={name="lenet", channels=[5000, 8000]}'
"""A model of 10⁹ weights."""

LITTLE = 8 << 20
"""Bytes that reading a plan may take."""


class Watched:
    """A client with so many samples, its log, and whether it has loaded any samples or a model."""

    def __init__(self, keys: ClientKeys, samples: int | None = None, **settings: Any) -> None:
        self.log: list[str] = []
        self.equipped, self._samples, self._equip = False, samples, with_plan(keys.number, None, part=True)
        self.member = Member(keys, None, self._loaded, tell=self.log.append, **settings)

    def _loaded(self, plan: Plan, most_weights: int = LARGEST) -> Equipment:
        self.equipped = True
        worker, initial = self._equip(plan, most_weights)
        return Equipment(replace(worker, indices=np.asarray(worker.indices)[: self._samples]), initial)

    def ask(self, message: Message) -> str:
        return tag_of(self.member.answer(encode(message)))


@pytest.fixture
def server(tmp_path: Path, tiny: Callable[..., Plan]) -> ServerByHand:
    return ServerByHand(new_keys(tmp_path, 3), tiny('secure.mode="on"'))


def offer(server: ServerByHand, *settings: str) -> Introduce:
    plan, roster = change(server.plan, settings), server.roster
    return Introduce(plan.to_toml(), roster.number, roster.hash(), 0)


# N11: one question makes a client build any model


def test_a_client_answers_about_a_billion_weights_with_its_memory_where_it_was(server: ServerByHand) -> None:
    """N11. One Introduce took 10 GB and 65 s of a client, whatever its policy. The answer follows from the text."""
    usual, large = Watched(server.keys[0]), Watched(server.keys[1], policy=Policy(most_weights=2 * 10**9))
    asked = offer(server, HUGE)
    with at_most(LITTLE):
        assert usual.ask(asked) == "abstention"
        assert large.ask(asked) == "introduction"
    assert (
        "the number of weights is 1.00022e+09 in the server's plan, most_weights allows at most 1e+08" in usual.log[0]
    )
    assert not usual.equipped
    assert not large.equipped


def test_a_statement_of_a_billion_weights_is_refused_before_a_model_is_built(server: ServerByHand) -> None:
    """N11, one message later."""
    victim = Watched(server.keys[0])
    begin = server.begin(victim.member, plan=offer(server, HUGE).plan)
    with at_most(LITTLE):
        assert victim.ask(begin) == "abstention"
    assert not victim.equipped


def test_what_the_text_does_not_say_is_bounded_before_it_is_loaded(
    server: ServerByHand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N11 with a data set of the client's own: its shape is known when it is loaded, and the model is not built yet."""
    (tmp_path / "wide_own.py").write_text(
        "import numpy as np, baffle\n"
        "def data():\n"
        "    few = baffle.Dataset(np.zeros((20, 1, 8, 8), np.float32), np.zeros(20, np.int64))\n"
        "    return baffle.Source(few, few, classes=10**9, shape=(1, 8, 8))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = change(server.plan, ['task.data="wide_own:data"'])
    with at_most(LITTLE), pytest.raises(Exception, match="most_weights allows at most 100,000,000"):
        with_plan(0, None, part=False)(plan, 10**8)


@pytest.mark.parametrize("setting", ["task.validation=true", "probe.stacked=true"])
def test_what_only_simulations_have_is_refused_by_its_text(server: ServerByHand, setting: str) -> None:
    """A split of a few samples can fail, and a client that fails says how few it has."""
    victim = Watched(server.keys[0])
    assert victim.ask(offer(server, setting)) == "abstention"
    assert "each client of a network" in victim.log[0] or "a server holds no training samples" in victim.log[0]
    assert not victim.equipped


# N5: refusals that depend on the number of samples


@pytest.mark.parametrize("batch", [8, 9, 32, 200, 240, 241, 480, 481, 10**6])
def test_no_answer_depends_on_how_many_samples_a_client_has(server: ServerByHand, batch: int) -> None:
    """N5. A policy that refused batches beyond half of a client's samples told their number, ±1, in a dozen questions.
    Whoever has too few uses fewer or sends zeros, and tells its own log."""
    server, answers = (
        ServerByHand(server.keys, change(server.plan, [f"federation.batch={batch}"])),
        list[tuple[str, ...]](),
    )
    clients = list[Watched]()
    for samples in (1, 15, 16, 17, 480):
        client = Watched(server.keys[0], samples)
        clients.append(client)
        introduced = client.ask(server.introduce())
        assert not client.equipped
        answers.append((introduced, client.ask(server.begin(client.member))))
    assert set(answers) == {("introduction", "ready")}, [client.log for client in clients]
    said = [" ".join(client.log) for client in clients]
    assert all("so it sends zeros" in words for words in said[:2])
    assert ("uses 8 of its 16 samples at once instead of" in said[2]) == (batch > 8)


def test_a_client_with_too_few_samples_sends_zeros_at_its_full_weight(server: ServerByHand) -> None:
    server = ServerByHand(server.keys, change(server.plan, ["federation.batch=32"]))
    few, usual = Watched(server.keys[0], 15), Watched(server.keys[1], 40)
    vectors = []
    for client in (few, usual):
        server.enter(client.member, server.begin(client.member))
        assert client.member._client is not None
        assert client.member._client.worker is not None
        vectors.append(client.member._client.worker.vector(0, server.state.weights, ()).view(np.int32))
    assert not vectors[0][:-EXTRAS].any()
    assert vectors[0][-EXTRAS:].tolist() == [15, 1, 0, 0]
    assert vectors[1][:-EXTRAS].all()
    assert vectors[1][-EXTRAS] == 40


def test_a_plan_that_a_client_cannot_load_is_refused_at_once_the_next_time(
    server: ServerByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client finds out too late that its data are missing: statements of which one is refused are lost for all."""
    monkeypatch.delenv("BAFFLE_DATA", raising=False)
    victim, plan = Watched(server.keys[0]), offer(server, 'task.data="mnist"').plan
    begin = server.begin(victim.member, plan=plan)
    assert [victim.ask(begin), victim.ask(offer(server, 'task.data="mnist"'))] == ["abstention"] * 2
    assert "could not begin with this plan" in victim.log[-1]
    assert victim.ask(server.introduce()) == "introduction"
    again = encode(Begin(begin.statement, ()))
    assert victim.member.answer(again) == abstention(again)


# N16: questions that make a client's marks grow


def test_asking_for_the_same_signature_again_leaves_no_mark(attack: Callable[..., HostileServer]) -> None:
    """N16. Each Halt added 164 bytes to a client's marks, and past 1 GiB its key was lost."""
    server = attack()
    view = server.begin()
    marks, halt = server.victims.keys[0].marks, Halt(server.request(view))
    first, size = server.victims.ask(0, halt), marks.stat().st_size
    for _ in range(20):
        assert server.victims.ask(0, halt) == first
    assert marks.stat().st_size == size


def test_no_state_beyond_the_last_round_is_signed(attack: Callable[..., HostileServer]) -> None:
    """N16. Rounds that a server calls skipped cost it nothing, and each left a line in the marks, for ever."""
    server = attack("rounds=2")
    view, skipped, halts = server.begin(), tuple[bytes, ...](), list[Halt]()
    for _ in range(3):
        skipped += (encode(Outcome(view.present.round, "skipped", ())),)
        view.present = view.lineage.advance(view.present, skipped[-1])
        halts.append(Halt(server.request(view, CatchUp("outcomes", 0, skipped))))
    for halt in halts[:2]:
        server.victims.ask(0, halt)
    size = server.victims.keys[0].marks.stat().st_size
    with refused(server, 0, "the state before round 3 of a run of 2 rounds"):
        server.victims.ask(0, halts[2])
    assert server.victims.keys[0].marks.stat().st_size == size


# N8: a crowd at the port


def test_a_crowd_at_a_clients_own_address_does_not_keep_it_out(tmp_path: Path) -> None:
    """N8. All places were held by whoever shares the client's address, and a newcomer got none. Time stands still, so
    that none of the crowd is too late for its proof."""
    with linked(new_links_keys(tmp_path / "keys"), 0, hold=True) as at, ExitStack() as crowd:
        for _ in range(300):
            crowd.enter_context(dial(at.address))
        with at.client(1):
            at.until_present(0, 1)


def test_a_crowd_at_other_addresses_does_not_keep_a_known_client_out(tmp_path: Path) -> None:
    """N8 from many addresses, of which none holds more places than is fair."""
    with linked(new_links_keys(tmp_path / "keys"), 0, hold=True) as at, ExitStack() as crowd:
        for number in range(100):
            crowd.enter_context(dial(at.address, source=f"127.0.1.{number + 1}"))
        door = at.link._port.door
        while door.turned_away < 100 - door.places:  # the link pauses after each that it turns away
            at.turn(REFUSAL_PAUSE)
        at.turn(REFUSAL_PAUSE)
        with at.client(1):
            at.until_present(0, 1)


# A journal that clients make grow

LOUD = msgspec.msgpack.encode(["\N{GRINNING FACE}" * 250_000, *range(9)])
"""A megabyte in the place of a message's name, which a refusal quotes."""

MOST_BYTES_OF_A_ROUND = 5_000 * MOST_REFUSALS
"""What the words of refusals may take in a round's metrics, in which a character may take twelve bytes."""


@pytest.fixture
def federation(tmp_path: Path, tiny: Callable[..., Plan]) -> Federation:
    fixed = ("federation.clients=6", "rounds=3", "secure.mode=on", "ring.n_max=400", "run.deadline_seconds=1")
    return Federation(new_keys(tmp_path, 6), tmp_path, tiny(*fixed))


def rows(federation: Federation, query: str) -> list[Any]:
    with closing(sqlite3.connect(federation.run / "journal.sqlite")) as db:
        return db.execute(query).fetchall()


def test_whatever_clients_answer_a_round_adds_little_to_the_journal(federation: Federation) -> None:
    """Each reason is cut to 300 characters, a client has one in a round, and its metrics quote twenty of all."""
    lines = federation.lines(6)

    def loud(honest: Answer) -> Answer:
        joins = ("introduce", "begin", "openings", "over")
        return lambda data: honest(data) if tag_of(data) in joins else LOUD

    for liar in (4, 5):
        lines.clients[liar] = loud(lines.clients[liar])
    federation.serve(lines)
    records = rows(federation, "SELECT length(CAST(record AS BLOB)) FROM metrics")
    events = rows(federation, "SELECT length(CAST(event AS BLOB)) FROM participation WHERE client IN (4, 5)")
    assert len(records) == 3
    assert len(events) == 6
    assert max(records)[0] < MOST_BYTES_OF_A_ROUND
    assert 1_000 < max(events)[0] < 1_500


def test_clients_that_come_and_go_in_turns_do_not_fill_the_journal(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes while the other is away waits for the next epoch, and each adds a statement to the journal: one
    every ten seconds, until no client could read the list of them. A run has so many epochs for newcomers at most."""
    monkeypatch.setattr(serve, "EPOCHS_FOR_NEWCOMERS", 8)
    federation.plan = change(federation.plan, ["rounds=40"])
    lines = federation.lines(6)
    answers = {client: lines.clients[client] for client in (4, 5)}

    def take_turns(exchange: int) -> None:
        for client, answer in answers.items():
            if (exchange // 4 + client) % 2:
                lines.clients[client] = answer
            else:
                lines.clients.pop(client, None)

    lines.before = take_turns
    federation.serve(lines, least=4)
    ((epochs,),) = rows(federation, "SELECT count(*) FROM epochs")
    assert epochs <= 1 + 8
    assert rows(federation, "SELECT count(*) FROM rounds") == [(40,)]
