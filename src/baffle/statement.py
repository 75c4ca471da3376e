"""The statement of a networked run: everything on which its clients must agree, under one hash.

The hash of the statement is the name of the run. All keys, masks and signatures are derived from the name, so clients
that were sent different statements cannot be summed together: their masks do not cancel, and the server gets noise.

A statement also holds commitments to nonces of the clients that were present. They are opened only after the statement
is fixed, and the salt of the run's directions and batches follows from them. So no server can choose the salt by trying
statements, and two runs of one plan never ask the same question.

A client that committed and does not open its nonce costs all others a statement. The next statement holds its signed
commitment as evidence, and clients charge that one to it instead of to the server.

An epoch is the part of a run that is played under one statement. The next epoch has its own statement, which names the
previous one and the hash of the journal's chain up to that round.
"""

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baffle.aggregation.client_policy import quorum
from baffle.aggregation.context import length_prefixed, signed, split_prefixed, state_text
from baffle.aggregation.messages import MOST_MEMBERS, SIGNATURE_BYTES, Signature, cut
from baffle.core.messages import Hash, Message, Number, decode, encode, first_number
from baffle.errors import RefusalError
from baffle.plan import Plan, RunSettings
from baffle.trajectory import Epoch

PROTOCOL: Literal[3] = 3  # the version of the protocol
NONCE_BYTES = 32

MOST_PLAN = 1 << 18
"""The most characters that a plan may have: room for a layout of some thousand rows. A client reads this much in less
than a second."""
ROSTER_TAG = b"baffle/roster/2"

NOTHING = bytes(32)  # the hash of the previous statement, in the first statement
PlanText = Annotated[str, Meta(max_length=MOST_PLAN)]


class Commitment(Message, frozen=True, tag="commitment"):
    """A client's signed promise to open a nonce."""

    client: Number
    commitment: Hash
    signature: Signature


class Statement(Message, frozen=True, tag="statement"):
    """The terms of an epoch. Mode, floor, threshold and groups of its sums are in the plan."""

    protocol: Literal[2, 3]
    plan: PlanText  # resolved, without the settings of `run` that are a machine's own
    initial: Hash  # the digest of the initial state
    roster: Number
    roster_hash: Hash
    tiers: Annotated[tuple[Number, ...], Meta(max_length=MOST_MEMBERS)]  # how many directions each client evaluates
    epoch: Number
    previous: Hash  # the statement of the epoch before
    first: Number  # the epoch's first round
    chain: Hash  # the hash of the chain up to there
    commitments: Annotated[tuple[Commitment, ...], Meta(max_length=MOST_MEMBERS)]
    # Evidence, which version 2 had not: for this plan, roster and epoch, not opened for an earlier statement
    unopened: Annotated[tuple[Commitment, ...], Meta(max_length=MOST_MEMBERS)]

    @property
    def salters(self) -> tuple[int, ...]:
        """The clients whose nonces give the salt."""
        return tuple(commitment.client for commitment in self.commitments)


class EpochRecord(msgspec.Struct, frozen=True):
    """An epoch in a server's journal: the statement as bytes, its clients' nonces, and their signatures."""

    statement: bytes
    nonces: bytes
    signatures: bytes = b""

    @property
    def run(self) -> bytes:
        return run_of(self.statement)


class PastEpoch(Message, frozen=True, tag="past-epoch"):
    """What a client needs to replay the rounds of an epoch in which it did not take part. If any of it is wrong, the
    replay does not lead to the chain's hash in the statement."""

    first: Number
    run: Hash
    salt: Hash


class Certificate(Message, frozen=True, tag="certificate"):
    """Clients' signatures of the chain's hash before a round, which covers the weights and all earlier rounds."""

    run: Hash
    round: Number
    chain: Hash
    signers: Annotated[tuple[Number, ...], Meta(max_length=MOST_MEMBERS)]
    signatures: bytes


def least_signers(plan: Plan) -> int:
    """How many clients must sign a state: a quorum of those of a round."""
    return quorum(plan.per_round, plan.secure.liars)


def require_certified(certificate: Certificate, directory: Mapping[int, bytes], least: int) -> None:
    """Refuse a certificate unless at least so many clients have signed it."""
    signatures = cut(certificate.signatures, SIGNATURE_BYTES, len(certificate.signers), "signatures")
    if len(set(certificate.signers)) != len(certificate.signers) or len(signatures) < least:
        raise RefusalError(f"{len(signatures)} clients have signed, expected at least {least}")
    text = state_text(certificate.run, certificate.round, certificate.chain)
    for signer, signature in zip(certificate.signers, signatures, strict=True):
        if signer not in directory or not signed(directory[signer], signature, text):
            raise RefusalError(f"client {signer} has not signed the state before round {certificate.round}")


def run_of(statement: bytes) -> bytes:
    """The name of a run: the hash of its statement, as it was received."""
    return sha256(f"baffle/statement/{first_number(statement)}".encode() + statement).digest()


def read_statement(data: bytes) -> Statement:
    """Read a statement of this version or of version 2. It must be encoded exactly as BAFFLE encodes it."""
    whole = _with_empty_evidence(data) if first_number(data) == 2 else data
    statement = decode(whole, Statement)
    if encode(statement) != whole:
        raise RefusalError("a statement that is not written as BAFFLE writes it")
    if list(statement.salters) != sorted(set(statement.salters)):
        raise RefusalError("a statement must name each client's commitment once, in order")
    return statement


def _with_empty_evidence(data: bytes) -> bytes:
    """A statement of version 2, which is the same array without its last item."""
    return bytes([data[0] + 1]) + data[1:] + b"\x90"


def shared_plan(plan: Plan) -> Plan:
    """The part of a plan that a statement holds: of `run.*` only what concerns clients."""
    keep = {name: getattr(plan.run, name) for name in ("downlink", "deadline_seconds")}
    return msgspec.structs.replace(plan, run=RunSettings(**keep))


def commitment_to(nonce: bytes) -> bytes:
    return sha256(b"baffle/nonce/2" + nonce).digest()


def commitment_text(server: bytes, plan: str, roster_hash: bytes, epoch: int, commitment: bytes) -> bytes:
    """The text that a client signs to commit to a nonce, for one server, plan, roster and epoch."""
    fields = (server, sha256(plan.encode()).digest(), roster_hash, epoch.to_bytes(8, "big"), commitment)
    return b"baffle/commitment/2" + length_prefixed(*fields)


def require_signed_commitments(statement: Statement, server: bytes, directory: Mapping[int, bytes]) -> None:
    """Refuse a statement with a commitment that its client has not signed."""
    _require_signed(statement.commitments, statement, server, directory)


def require_evidence(statement: Statement, server: bytes, directory: Mapping[int, bytes]) -> None:
    """Refuse evidence that is not signed by the client that it speaks against, or against one that takes part."""
    against = [one.client for one in statement.unopened]
    if against != sorted(set(against)) or not set(against).isdisjoint(statement.salters):
        raise RefusalError("a statement must name each client once, as one of the epoch or as one that opened no nonce")
    _require_signed(statement.unopened, statement, server, directory)


def _require_signed(
    commitments: Iterable[Commitment], statement: Statement, server: bytes, directory: Mapping[int, bytes]
) -> None:
    for one in commitments:
        text = commitment_text(server, statement.plan, statement.roster_hash, statement.epoch, one.commitment)
        if one.client not in directory or not signed(directory[one.client], one.signature, text):
            raise RefusalError(f"the statement's commitment of client {one.client} is not signed by it")


def least_salt(plan: Plan) -> int:
    """How many clients must commit to a nonce: over a third of the roster, or a quorum if the server may lie."""
    clients = plan.federation.clients
    return quorum(clients, plan.secure.liars) if plan.secure.mode == "malicious-server" else clients // 3 + 1


def require_enough_salt(statement: Statement, plan: Plan) -> None:
    """Refuse a statement with too few commitments."""
    least = least_salt(plan)
    if len(statement.commitments) < least:
        raise RefusalError(f"{len(statement.commitments)} clients have committed to a nonce, expected at least {least}")


def read_roster_text(text: bytes, roster_hash: bytes) -> tuple[bytes, dict[int, bytes]]:
    """The identities of the server and of the clients, by number, from a roster's signed text."""
    if sha256(text).digest() != roster_hash or not text.startswith(ROSTER_TAG):
        raise RefusalError("the text of another roster")
    fields = split_prefixed(text[len(ROSTER_TAG) :])
    if len(fields) < 3 or len(fields) % 2 == 0:
        raise RefusalError("a roster that is not whole")
    return fields[2], {number: key for number, key in enumerate(fields[3::2]) if key}


def salt_of(run: bytes, statement: Statement, nonces: bytes) -> bytes:
    """The salt of an epoch. Refuses nonces that are not those of the statement's commitments."""
    opened = [nonces[at : at + NONCE_BYTES] for at in range(0, len(nonces), NONCE_BYTES)]
    if [commitment_to(nonce) for nonce in opened] != [one.commitment for one in statement.commitments]:
        raise RefusalError("nonces that are not those of the statement's commitments")
    return sha256(b"baffle/salt/2" + run + nonces).digest()


def require_signed_by_all(record: EpochRecord, statement: Statement, directory: Mapping[int, bytes]) -> None:
    """Refuse an epoch whose statement has not been signed by every client that it names."""
    signatures = cut(record.signatures, SIGNATURE_BYTES, len(statement.salters), "signatures")
    for client, signature in zip(statement.salters, signatures, strict=True):
        if client not in directory or not signed(directory[client], signature, ready_text(record.run)):
            raise RefusalError(f"client {client} has not signed the statement")


def ready_text(run: bytes) -> bytes:
    """The text that a client signs when it is ready to take part in a run."""
    return b"baffle/ready/2" + length_prefixed(run)


def epoch_of(record: EpochRecord) -> Epoch:
    """The epoch that a record is about, if its nonces are those of its statement."""
    statement = read_statement(record.statement)
    return Epoch(statement.first, salt_of(record.run, statement, record.nonces), record.run, statement.chain)
