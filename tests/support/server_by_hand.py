"""A server by hand: it asks one client to take part, and speaks for all the others."""

from typing import Any

import msgspec

from baffle.core.messages import Message, decode, encode
from baffle.core.state import chain_start
from baffle.network.joining import Begin, Introduce, Introduction, Openings, Ready, Salted
from baffle.network.keys.folders import ClientKeys
from baffle.network.member.member import Member
from baffle.network.settling import N_MAX, tiers_for, with_places
from baffle.plan import Plan
from baffle.statement import (
    NOTHING,
    PROTOCOL,
    Commitment,
    PastEpoch,
    Statement,
    commitment_text,
    commitment_to,
    run_of,
    shared_plan,
)
from baffle.task.load import load_server_task
from baffle.trajectory import trajectory_of


class ServerByHand:
    """Makes the statements of a run. Clients other than the one that is asked have nonces that everybody can guess."""

    def __init__(self, keys: list[ClientKeys], plan: Plan) -> None:
        self.keys, self.roster = keys, keys[0].roster
        task = load_server_task(with_places(plan, len(self.roster.clients)), None, plan.ring.n_max or N_MAX)
        self.plan = shared_plan(task.plan)
        self.trajectory = trajectory_of(task.plan, len(task.initial_weights()))
        self.state = self.trajectory.rule.start(task.initial_weights())
        self.chain = chain_start(self.trajectory.digest, self.state)

    def introduce(self, epoch: int = 0) -> Introduce:
        return Introduce(self.plan.to_toml(), self.roster.number, self.roster.hash(), epoch)

    def commitment(self, client: int, asked: Introduce) -> Commitment:
        """The commitment of a client that this server speaks for."""
        commitment = commitment_to(self.nonce(client))
        text = commitment_text(self.roster.server_key, asked.plan, asked.roster_hash, asked.epoch, commitment)
        return Commitment(client, commitment, self.keys[client].identity.sign(text))

    @staticmethod
    def nonce(client: int) -> bytes:
        return bytes([client + 1] * 32)

    def statement(self, client: int, introduction: Introduction, **changes: Any) -> Statement:
        """The first statement of the run, with a client's own commitment; `changes` are to its fields."""
        asked = self.introduce(changes.get("epoch", 0))
        own = Commitment(client, introduction.commitment, introduction.signature)
        others = (self.commitment(number, asked) for number in range(len(self.keys)))
        commitments = tuple(own if one.client == client else one for one in others)
        roster, tiers = (asked.roster, asked.roster_hash), tiers_for(self.plan, {})
        first = Statement(
            PROTOCOL, asked.plan, self.state.digest(), *roster, tiers, 0, NOTHING, 0, self.chain, commitments, ()
        )
        return msgspec.structs.replace(first, **changes)

    def openings(self, client: int, statement: Statement, nonce: bytes) -> Openings:
        nonces = [nonce if one == client else self.nonce(one) for one in statement.salters]
        return Openings(run_of(encode(statement)), b"".join(nonces))

    def begin(self, member: Member, answered: int = 0, past: tuple[PastEpoch, ...] = (), **changes: Any) -> Begin:
        """A statement for a client, which introduces itself first. `changes` are to its fields."""
        introduction = decode(member.answer(encode(self.introduce(changes.get("epoch", 0)))), Introduction)
        statement = self.statement(member.keys.number, introduction, **changes)
        return Begin(encode(statement), past, answered=answered)

    def enter(self, member: Member, begin: Begin | None = None) -> bytes:
        """Let a client enter a run, and return its name."""
        begin = begin or self.begin(member)
        ready = decode(member.answer(encode(begin)), Ready)
        statement = decode(begin.statement, Statement)
        openings = self.openings(member.keys.number, statement, ready.nonce)
        decode(member.answer(encode(openings)), Salted)
        return openings.run


def ask(member: Member, message: Message) -> bytes:
    return member.answer(encode(message))
