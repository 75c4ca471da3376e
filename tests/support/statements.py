"""Statements, rosters and certificates with real signatures, and the journal of a networked run made from them."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.context import length_prefixed, state_text
from baffle.core.messages import Group, Outcome, encode
from baffle.core.state import Present, chain_epoch
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan
from baffle.statement import (
    NOTHING,
    PROTOCOL,
    ROSTER_TAG,
    Certificate,
    Commitment,
    EpochRecord,
    Statement,
    commitment_text,
    commitment_to,
    epoch_of,
    read_statement,
    ready_text,
    shared_plan,
)
from baffle.trajectory import trajectory_of

N = 5  # weights of the model whose run is journalled

INITIAL = np.linspace(-1, 1, N, dtype=np.float32)


def written(statement: Statement) -> bytes:
    """A statement as bytes, in the version that it names. In version 2 it ended before the evidence."""
    data = encode(statement)
    if statement.protocol == PROTOCOL:
        return data
    assert (statement.protocol, data[:1], data[-1:]) == (2, b"\x9d", b"\x90")  # 13 items, of which the last is empty
    return b"\x9c" + data[1:-1]


class Signers:
    """The clients of a federation and its server, with their keys and nonces."""

    def __init__(self, clients: int, protocol: Literal[2, 3] = PROTOCOL) -> None:
        self.protocol = protocol
        self.server = b"server's identity".ljust(32)
        self.identities = [Ed25519PrivateKey.generate() for _ in range(clients)]
        keys = [identity.public_key().public_bytes_raw() for identity in self.identities]
        self.directory = dict(enumerate(keys))
        self.roster = ROSTER_TAG + length_prefixed(
            b"7", b"2031-05-01", self.server, *(field for key in keys for field in (key, b"node"))
        )
        self.roster_hash = sha256(self.roster).digest()

    def nonce(self, client: int, epoch: int) -> bytes:
        return sha256(f"nonce of client {client} in epoch {epoch}".encode()).digest()

    def statement(
        self,
        plan: Plan,
        initial: bytes,
        chain: bytes,
        *,
        epoch: int = 0,
        previous: bytes = NOTHING,
        first: int = 0,
        salters: Iterable[int] | None = None,
    ) -> Statement:
        text = shared_plan(plan).to_toml()
        tiers = (plan.probe.k,) * plan.federation.clients
        clients = range(len(self.identities)) if salters is None else salters
        commitments = tuple(self.commitment(text, client, epoch) for client in clients)
        return Statement(
            self.protocol, text, initial, 7, self.roster_hash, tiers, epoch, previous, first, chain, commitments, ()
        )

    def commitment(self, plan: str, client: int, epoch: int) -> Commitment:
        hidden = commitment_to(self.nonce(client, epoch))
        text = commitment_text(self.server, plan, self.roster_hash, epoch, hidden)
        return Commitment(client, hidden, self.identities[client].sign(text))

    def record(self, statement: Statement) -> EpochRecord:
        """An epoch that all clients of its statement have signed and opened their nonces for."""
        data = written(statement)
        run = EpochRecord(data, b"").run
        nonces = b"".join(self.nonce(client, statement.epoch) for client in statement.salters)
        signatures = b"".join(self.identities[client].sign(ready_text(run)) for client in statement.salters)
        return EpochRecord(data, nonces, signatures)

    def certificate(self, run: bytes, number: int, chain: bytes, signers: Sequence[int]) -> Certificate:
        text = state_text(run, number, chain)
        signatures = b"".join(self.identities[client].sign(text) for client in signers)
        return Certificate(run, number, chain, tuple(signers), signatures)


class NetworkedRun:
    """The folder of a networked run whose epochs, rounds and certificates a test adds by hand."""

    def __init__(self, plan: Plan, folder: Path, protocol: Literal[2, 3] = PROTOCOL) -> None:
        self.signers, self.folder = Signers(plan.federation.clients, protocol), folder
        trajectory = trajectory_of(plan, N)
        self.initial = trajectory.rule.start(INITIAL)
        self.lineage = Lineage(trajectory)
        self.present = self.lineage.beginning(self.initial)
        folder.mkdir(exist_ok=True)
        (folder / "plan.toml").write_text(plan.to_toml())
        self.journal = Journal.create(folder / "journal.sqlite", plan, self.initial, {}, networked=True)

    def begin(self, salters: Iterable[int] | None = None) -> EpochRecord:
        """Begin an epoch at the present."""
        epochs, present = self.lineage.epochs, self.present
        statement = self.signers.statement(
            self.lineage.trajectory.plan,
            self.initial.digest(),
            present.chain,
            epoch=len(epochs),
            previous=epochs[-1].run if epochs else NOTHING,
            first=present.round,
            salters=salters,
        )
        record = self.signers.record(statement)
        self.journal.add_epoch(record, self.signers.roster, present.state)
        self.lineage = self.lineage.in_epoch(epoch_of(record))
        self.present = Present(present.round, present.state, chain_epoch(present.chain, record.run))
        return record

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            present = self.present
            outcome = self.outcome(present.round)
            self.present = self.lineage.advance(present, encode(outcome))
            who = dict.fromkeys(range(len(self.signers.identities)), "contributed")
            self.journal.append(present.chain, outcome, self.present.state, participation=who)
        self.journal.commit()

    def outcome(self, number: int) -> Outcome:
        trajectory = self.lineage.trajectory
        totals = np.random.default_rng(number).integers(-1000, 1000, trajectory.length).astype("<i4").tobytes()
        return Outcome(number, "scalars", (Group(trajectory.key_number(number, 0), totals, 30),))

    def certify(self, signers: Sequence[int] | None = None) -> Certificate:
        """Have clients of the present epoch sign the present state, and keep it."""
        everybody = range(len(self.signers.identities))
        run, present = self.lineage.epochs[-1].run, self.present
        certificate = self.signers.certificate(run, present.round, present.chain, tuple(signers or everybody))
        self.journal.statements.add_certificate(certificate)
        return certificate

    def whole(self) -> Path:
        """Three epochs, of which the second has no round, and certificates at the end of the first and of the run."""
        self.begin()
        self.play(3)
        self.certify()
        self.begin()
        self.begin(range(len(self.signers.identities) - 1))
        self.play(2)
        self.certify()
        self.journal.close()
        return self.folder


def changed(record: EpochRecord, **changes: object) -> bytes:
    """The statement of an epoch with other fields, as bytes."""
    statement = read_statement(record.statement)
    fields = {name: getattr(statement, name) for name in statement.__struct_fields__}
    return encode(Statement(**(fields | changes)))
