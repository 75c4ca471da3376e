"""A client that lies costs the others a round at most: the run goes on, its weights are right, and the liar is named
where that is possible. Real clients, a real server; only the liar's answers are changed."""

import secrets
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Event

import msgspec
import numpy as np
import pytest

from baffle.aggregation.context import sign
from baffle.aggregation.messages import Advertisement, Turned
from baffle.aggregation.shares import SHARE_BYTES
from baffle.client.worker import Worker
from baffle.core.arrays import F32
from baffle.core.messages import Contribution, decode, encode, tag_of
from baffle.core.ports import CONTRIBUTED, MISSING
from baffle.core.ring import EXTRAS, RingVector
from baffle.core.update import State
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.joining import Introduction, Ready, Salted
from baffle.network.member.equipment import Equipment, with_plan
from baffle.network.member.policy import Policy
from baffle.plan import Plan
from baffle.plan.sections import LARGEST
from tests.support.lines_in_memory import Answer, Federation, LinesInMemory, new_keys

CLIENTS, LIAR, VICTIM, ROUNDS = 6, 4, 1, 3
HONEST = [client for client in range(CLIENTS) if client != LIAR]

Lie = Callable[[bytes, bytes], bytes | None]  # a request, and the honest answer to it → what the liar answers instead


@pytest.fixture
def played(tmp_path: Path, tiny: Callable[..., Plan]) -> Federation:
    fixed = (f"federation.clients={CLIENTS}", f"rounds={ROUNDS}", "secure.mode=on", "ring.n_max=400")
    return Federation(new_keys(tmp_path, CLIENTS), tmp_path, tiny(*fixed, "run.deadline_seconds=1"))


def lying(honest: Answer, lie: Lie) -> Answer:
    def answer(request: bytes) -> bytes | None:
        told = honest(request)
        return None if told is None else lie(request, told)

    return answer


def play_with(played: Federation, lie: Lie) -> LinesInMemory:
    lines = played.lines(CLIENTS)
    lines.seconds = 1.0  # the run is over before a client that is left out may come back
    lines.clients[LIAR] = lying(lines.clients[LIAR], lie)
    played.serve(lines, least=CLIENTS - 1)
    return lines


def require_unharmed(played: Federation, *, skipped: int = 0) -> None:
    """The run has ended, and the honest clients hold its weights."""
    verified = verify(played.run)
    assert verified.rounds == ROUNDS
    assert verified.skipped <= skipped
    played.require_agreement(HONEST)


def events(played: Federation, client: int) -> list[str]:
    """How a client ended each round, by the server's journal."""
    with closing(sqlite3.connect(played.run / "journal.sqlite")) as db:
        rows = db.execute("SELECT event FROM participation WHERE client = ? ORDER BY round", (client,)).fetchall()
    return [event for (event,) in rows]


def require_barred(played: Federation, why: str) -> None:
    """The server has left the liar out from some round on and says why. It blames nobody else."""
    assert events(played, LIAR)[-1] == f"left out: {why}"
    assert {event for client in HONEST for event in events(played, client)} == {CONTRIBUTED}


def only(kind: type[msgspec.Struct], change: Callable[[bytes], bytes]) -> Lie:
    """Change the answers of one kind."""
    return lambda _request, told: change(told) if tag_of(told) == kind.__struct_config__.tag else told


NONSENSE: dict[str, Callable[[bytes], bytes]] = {
    "noise": lambda told: secrets.token_bytes(len(told)),
    "nothing": lambda _told: b"",
    "half of it": lambda told: told[: len(told) // 2],
    "twice": lambda told: told + told,
    "deep nesting": lambda _told: b"\x91" * 5000,
    "a long text": lambda _told: msgspec.msgpack.encode(["abstention", 0, "\x1b[2J" * 100_000]),
}


KINDS: list[type[msgspec.Struct]] = [Introduction, Ready, Salted, Advertisement, Turned, Contribution]
QUICK = set(zip(KINDS, NONSENSE, strict=True))
CASES = [
    pytest.param(kind, nonsense, marks=[] if (kind, nonsense) in QUICK else pytest.mark.slow)
    for kind, nonsense in product(KINDS, NONSENSE)
]


@pytest.mark.parametrize(("kind", "nonsense"), CASES)
def test_nonsense_in_any_phase_costs_nobody_else_anything(
    played: Federation, kind: type[msgspec.Struct], nonsense: str
) -> None:
    play_with(played, only(kind, NONSENSE[nonsense]))
    require_unharmed(played)
    assert {event for client in HONEST for event in events(played, client)} == {CONTRIBUTED}
    if kind in (Introduction, Ready, Salted):
        assert played.said(f"client {LIAR} does not take part")
    else:
        assert CONTRIBUTED not in events(played, LIAR)
        assert events(played, LIAR)[0] != MISSING
    assert not any("\x1b" in line for line in [*played.told, *events(played, LIAR)])
    assert max(map(len, [*played.told, *events(played, LIAR)])) < 2000


def test_a_client_that_commits_and_never_opens_is_left_out(played: Federation) -> None:
    play_with(played, lambda _request, told: None if tag_of(told) == "ready" else told)
    require_unharmed(played)
    assert played.said(f"client {LIAR} does not take part")


def test_a_client_that_opens_another_nonce_is_named(played: Federation) -> None:
    def other(told: bytes) -> bytes:
        return encode(msgspec.structs.replace(decode(told, Ready), nonce=secrets.token_bytes(32)))

    play_with(played, only(Ready, other))
    require_unharmed(played)
    assert played.said(f"client {LIAR} does not take part: it has opened another nonce")


def test_a_client_that_goes_silent_costs_one_deadline(played: Federation) -> None:
    play_with(played, lambda _request, told: None if tag_of(told) == "contribution" else told)
    require_unharmed(played)


@dataclass(frozen=True)
class Boaster(Worker):
    """A worker that claims another weight than its own in one round, and a loss that goes with it."""

    claimed: int = 2**20

    def vector(self, round_number: int, weights: F32, optimizer: State = ()) -> RingVector:
        vector = super().vector(round_number, weights, optimizer).view(np.int32).astype(np.int64)
        if round_number == 1:
            vector[[-EXTRAS, -1]] = self.claimed, vector[-1] * self.claimed // vector[-EXTRAS]
        return vector.astype(np.uint32)


def boast(played: Federation, claimed: int) -> None:
    """Play a run in which the liar claims a weight."""
    honest = with_plan(LIAR, None, part=True)

    def equip(plan: Plan, _most_weights: int = LARGEST) -> Equipment:
        equipment = honest(plan)
        fields = {name: getattr(equipment.worker, name) for name in Worker.__dataclass_fields__}
        return equipment._replace(worker=Boaster(**fields, claimed=claimed))

    lines, liar = played.lines(CLIENTS), played.member(LIAR)
    liar.consent.equip = equip
    lines.clients[LIAR] = liar.answer
    played.serve(lines)


def require_one_round_lost(played: Federation) -> None:
    verified = verify(played.run)
    assert (verified.rounds, verified.skipped) == (ROUNDS, 1)
    played.require_agreement(HONEST)


def test_an_absurd_sample_count_costs_one_round(played: Federation) -> None:
    """Counts travel only inside masked vectors, so the liar has no name; but no sum is taken that claims too much."""
    boast(played, 2**20)
    require_one_round_lost(played)


NEGATIVE = 7 - 1199  # all six together then seem to have 7 samples; the other five have 1199
SMALL = ("federation.weighting=samples", "ring.d_max=4.0")


@pytest.mark.parametrize("settings", [SMALL, ("federation.weighting=uniform", "secure.mode=malicious-server")])
def test_no_client_makes_an_honest_update_count_many_times(
    tmp_path: Path, tiny: Callable[..., Plan], settings: tuple[str, ...]
) -> None:
    """N18. A negative weight makes the divisor of a mean as small as the liar likes, and so the mean as large."""
    fixed = (f"federation.clients={CLIENTS}", f"rounds={ROUNDS}", "secure.mode=on", "run.deadline_seconds=1")
    policy = Policy(without_privacy=True)
    played = Federation(new_keys(tmp_path, CLIENTS), tmp_path, tiny(*fixed, *settings), policy=policy)
    boast(played, NEGATIVE if "federation.weighting=samples" in settings else 2 - len(HONEST))
    require_one_round_lost(played)


class Copier:
    """Signs the keys of a peer as its own: at once, or after a round with keys of its own."""

    def __init__(self, played: Federation, victim: Answer, *, at_once: bool) -> None:
        self.played, self.victim, self.at_once = played, victim, at_once
        self.overheard = Event()
        self.keys: tuple[bytes, ...] = ()
        self.lists = 0

    def overhear(self, request: bytes) -> bytes | None:
        told = self.victim(request)
        if told is not None and tag_of(told) == "advertisement":
            self.keys = decode(told, Advertisement).keys
            self.overheard.set()
        return told

    def lie(self, _request: bytes, told: bytes) -> bytes:
        if tag_of(told) == "turned" and not self.at_once and self.lists == 1:
            return encode(msgspec.structs.replace(decode(told, Turned), sealed=None))  # so that it is asked for keys
        if tag_of(told) != "advertisement":
            return told
        self.lists += 1
        assert self.overheard.wait(60)
        own = decode(told, Advertisement)
        if self.lists == 1 and not self.at_once:
            return told
        return resigned(self.played, msgspec.structs.replace(own, keys=self.keys))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_copied_mask_key_is_refused_from_the_copier(played: Federation, *, at_once: bool) -> None:
    """Everybody would refuse a slot with one key twice. A copier that has sent keys of its own before is left out from
    then on; one that has not is refused whenever it tries."""
    lines = played.lines(CLIENTS)
    lines.seconds = 1.0
    copier = Copier(played, lines.clients[VICTIM], at_once=at_once)
    lines.clients[VICTIM] = copier.overhear
    lines.clients[LIAR] = lying(lines.clients[LIAR], copier.lie)
    played.serve(lines)
    require_unharmed(played)
    if at_once:
        assert events(played, LIAR)[0] == f"client {LIAR} advertises a key that client {VICTIM} advertised before"
        assert CONTRIBUTED not in events(played, LIAR)
    else:
        require_barred(played, f"before round 1 it advertised a key of client {VICTIM} as its own")


def resigned(played: Federation, unsigned: Advertisement) -> bytes:
    """A list of keys, signed by the liar for the run that is being played."""
    with Journal.open(played.run / "journal.sqlite") as journal:
        run = journal.statements.epochs()[-1].run
    return encode(sign(played.keys[LIAR].identity, run, unsigned))


FLIPPED = {
    "share": "in round 0 it released a share that client 1 had not dealt to it",
    "own": "in round 0 it dealt shares that do not give what it had committed to",
}
"""Where a bit is flipped → why the liar is left out: in its share of a peer's secret, or of its own."""


@pytest.mark.parametrize("place", FLIPPED)
def test_one_flipped_bit_of_a_share_is_corrected(played: Federation, place: str) -> None:
    """With six clients and a threshold of four there is one share to spare for a lie."""

    def flip(told: bytes) -> bytes:
        turned = decode(told, Turned)
        if turned.unmasked is None:
            return told
        unmasked = turned.unmasked
        if place == "own":
            spoilt = msgspec.structs.replace(unmasked, own=_with_flipped_bit(unmasked.own, 0))
        else:
            second = _with_flipped_bit(unmasked.shares, SHARE_BYTES)
            spoilt = msgspec.structs.replace(unmasked, shares=second)
        return encode(msgspec.structs.replace(turned, unmasked=spoilt))

    play_with(played, only(Turned, flip))
    require_unharmed(played)
    require_barred(played, FLIPPED[place])


def _with_flipped_bit(data: bytes, place: int) -> bytes:
    return bytes([*data[:place], data[place] ^ 1, *data[place + 1 :]])
