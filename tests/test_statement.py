"""A run is its statement: any other words give another run, and nobody chooses the salt."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from baffle.aggregation.client_policy import quorum
from baffle.aggregation.context import length_prefixed
from baffle.core.messages import decode, encode
from baffle.errors import MessageError, RefusalError
from baffle.plan import Plan, RunSettings, parse
from baffle.statement import (
    NOTHING,
    PROTOCOL,
    ROSTER_TAG,
    Certificate,
    Commitment,
    EpochRecord,
    Statement,
    commitment_to,
    epoch_of,
    least_salt,
    read_roster_text,
    read_statement,
    require_certified,
    require_enough_salt,
    require_evidence,
    require_signed_by_all,
    require_signed_commitments,
    run_of,
    salt_of,
    shared_plan,
)
from baffle.trajectory import Epoch
from tests.support.statements import Signers, written

CLIENTS = 7
MALICIOUS = ("secure.mode=malicious-server", f"federation.clients={CLIENTS}")
HONEST = ("secure.mode=on", f"federation.clients={CLIENTS}")


@dataclass(frozen=True)
class Setting:
    """A statement, and those who have signed it."""

    plan: Plan
    signers: Signers
    statement: Statement

    @property
    def record(self) -> EpochRecord:
        return self.signers.record(self.statement)


@pytest.fixture(scope="module")
def setting(tiny: Callable[..., Plan]) -> Setting:
    plan = tiny(*HONEST)
    signers = Signers(CLIENTS)
    return Setting(plan, signers, signers.statement(plan, b"i" * 32, b"c" * 32))


# The name of a run


def test_a_run_is_named_by_the_bytes_of_its_statement(setting: Setting) -> None:
    data = encode(setting.statement)
    assert run_of(data) == sha256(b"baffle/statement/3" + data).digest() == setting.record.run
    assert read_statement(data) == setting.statement
    assert run_of(data + b"\0") != run_of(data)


COMMITMENTS = st.lists(
    st.builds(Commitment, st.integers(0, 9), st.binary(min_size=32, max_size=32), st.binary(min_size=64, max_size=64)),
    max_size=3,
    unique_by=lambda one: one.client,
).map(lambda some: tuple(sorted(some, key=lambda one: one.client)))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "plan": st.text(max_size=20),
    "initial": st.binary(min_size=32, max_size=32),
    "roster": st.integers(0, 2**63 - 1),
    "roster_hash": st.binary(min_size=32, max_size=32),
    "tiers": st.lists(st.integers(0, 100), max_size=9).map(tuple),
    "epoch": st.integers(0, 2**63 - 1),
    "previous": st.binary(min_size=32, max_size=32),
    "first": st.integers(0, 2**63 - 1),
    "chain": st.binary(min_size=32, max_size=32),
    "commitments": COMMITMENTS,
    "unopened": COMMITMENTS,
}


@given(st.sampled_from(sorted(VALUES)), st.data())
@settings(max_examples=200)
def test_any_other_field_gives_another_run(field: str, data: st.DataObject) -> None:
    """So clients that were told different things hold different names."""
    assert {"protocol", *VALUES} == set(Statement.__struct_fields__)
    base = Statement(PROTOCOL, "p", b"i" * 32, 7, b"r" * 32, (4, 4), 0, NOTHING, 0, b"c" * 32, (), ())
    value = data.draw(VALUES[field])
    other = replace(base, **{field: value})
    assert (run_of(encode(other)) == run_of(encode(base))) == (value == getattr(base, field))
    assert read_statement(encode(other)) == other


def test_another_protocol_is_refused(setting: Setting) -> None:
    tree = msgspec.msgpack.decode(encode(setting.statement))
    for protocol in (0, 1, 4, "3", None):
        with pytest.raises(MessageError, match="Statement"):
            read_statement(msgspec.msgpack.encode([tree[0], protocol, *tree[2:]]))
    for field in ("initial", "roster_hash", "previous", "chain"):
        with pytest.raises(MessageError, match="Statement"):
            read_statement(encode(replace(setting.statement, **{field: bytes(31)})))


def test_a_statement_of_version_2_keeps_its_name_and_has_no_evidence(setting: Setting) -> None:
    earlier, present = replace(setting.statement, protocol=2), encode(setting.statement)
    data = written(earlier)
    assert read_statement(data) == replace(setting.statement, protocol=2)
    assert run_of(data) == sha256(b"baffle/statement/2" + data).digest()
    for mixed in (encode(earlier), b"\x9c" + present[1:-1]):
        with pytest.raises(MessageError, match=r"Statement|not written as BAFFLE writes it"):
            read_statement(mixed)


def test_every_other_encoding_of_the_same_statement_is_refused(setting: Setting) -> None:
    """One statement would otherwise have many names, and a server could try them."""
    data = encode(setting.statement)
    shorter = msgspec.msgpack.encode(setting.statement)  # with numbers as short as they can be written
    assert shorter != data
    assert decode(shorter, Statement) == setting.statement
    with pytest.raises(RefusalError, match="not written as BAFFLE writes it"):
        read_statement(shorter)
    at = data.index(setting.statement.plan.encode())
    assert data[at - 3] == 0xDA  # a text with a length of two bytes, where four would do as well
    longer = data[: at - 3] + b"\xdb\0\0" + data[at - 2 :]
    assert decode(longer, Statement) == setting.statement
    with pytest.raises(RefusalError, match="not written as BAFFLE writes it"):
        read_statement(longer)


@given(st.data())
@settings(max_examples=200)
def test_whatever_is_read_is_written_alike(setting: Setting, data: st.DataObject) -> None:
    """A damaged statement is refused, or is another one under its own name."""
    whole = encode(setting.statement)
    place = data.draw(st.integers(0, len(whole) - 1))
    put = data.draw(st.binary(min_size=1, max_size=2))
    damaged = whole[:place] + put + whole[place + len(put) :]
    try:
        assert encode(read_statement(damaged)) == damaged
    except MessageError:
        pass
    else:
        assert (run_of(damaged) == run_of(whole)) == (damaged == whole)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 1), (2, 1, 0)])
def test_commitments_stand_once_each_and_in_order(setting: Setting, order: tuple[int, ...]) -> None:
    mixed = replace(setting.statement, commitments=tuple(setting.statement.commitments[place] for place in order))
    with pytest.raises(RefusalError, match="each client's commitment once, in order"):
        read_statement(encode(mixed))


def test_a_statement_holds_of_the_run_section_only_what_concerns_clients(tiny: Callable[..., Plan]) -> None:
    plan = tiny(*HONEST, "run.workers=7", "run.snapshot_every=3", "run.deadline_seconds=9", "run.downlink=delta")
    kept = shared_plan(plan)
    assert kept.run == RunSettings(deadline_seconds=9, downlink="delta")
    assert replace(kept, run=plan.run) == plan
    assert parse(kept.to_toml()) == kept
    assert kept.trajectory_digest() == plan.trajectory_digest()


# Commitments and the salt


def test_a_commitment_that_its_client_has_not_signed_is_refused(setting: Setting) -> None:
    signed, signers = setting.statement, setting.signers
    require_signed_commitments(signed, signers.server, signers.directory)
    first, second, *rest = signed.commitments
    spoilt: dict[str, dict[str, Any]] = {
        "of another client": {"commitments": (replace(first, signature=second.signature), second, *rest)},
        "to another nonce": {"commitments": (replace(first, commitment=b"n" * 32), second, *rest)},
        "for another epoch": {"epoch": 1},
        "for another plan": {"plan": signed.plan + "\n"},
        "for another roster": {"roster_hash": bytes(32)},
    }
    for changes in spoilt.values():
        with pytest.raises(RefusalError, match="commitment of client 0 is not signed by it"):
            require_signed_commitments(replace(signed, **changes), signers.server, signers.directory)
    with pytest.raises(RefusalError, match="commitment of client 0"):
        require_signed_commitments(signed, b"another".ljust(32), signers.directory)
    without = {client: key for client, key in signers.directory.items() if client != 3}
    for strangers in (without, without | {3: b"no key"}):
        with pytest.raises(RefusalError, match="commitment of client 3"):
            require_signed_commitments(signed, signers.server, strangers)


def test_evidence_is_signed_and_about_clients_that_do_not_take_part(setting: Setting) -> None:
    whole, signers = setting.statement, setting.signers
    statement = replace(whole, commitments=whole.commitments[2:], unopened=whole.commitments[:2])
    require_evidence(statement, signers.server, signers.directory)
    first, second = statement.unopened
    for unopened in ((second, first), (first, first), (first, whole.commitments[2])):
        with pytest.raises(RefusalError, match="each client once"):
            require_evidence(replace(statement, unopened=unopened), signers.server, signers.directory)
    for changes in ({"epoch": 1}, {"plan": "another"}, {"unopened": (replace(first, signature=second.signature),)}):
        with pytest.raises(RefusalError, match="commitment of client 0 is not signed by it"):
            require_evidence(replace(statement, **changes), signers.server, signers.directory)
    with pytest.raises(RefusalError, match="commitment of client 1 is not signed by it"):
        require_evidence(statement, signers.server, {0: signers.directory[0]})


@pytest.mark.parametrize(("mode", "least"), [(HONEST, 3), (MALICIOUS, 5)])
def test_too_few_commitments_are_refused(tiny: Callable[..., Plan], mode: tuple[str, ...], least: int) -> None:
    """More than a third of the clients salt a run, and more than two thirds if the server may lie."""
    for clients in range(3, 12):
        thirds = least_salt(tiny(mode[0], f"federation.clients={clients}")) * 3
        assert thirds - 3 <= clients * (2 if mode is MALICIOUS else 1) < thirds
    plan, signers = tiny(*mode), Signers(CLIENTS)
    for count in range(CLIENTS + 1):
        statement = signers.statement(plan, bytes(32), bytes(32), salters=range(count))
        if count >= least:
            require_enough_salt(statement, plan)
            continue
        with pytest.raises(RefusalError, match=f"{count} clients have committed.*at least {least}"):
            require_enough_salt(statement, plan)


def test_the_salt_follows_from_the_run_and_all_nonces(setting: Setting) -> None:
    record, statement = setting.record, setting.statement
    salt = salt_of(record.run, statement, record.nonces)
    assert salt == sha256(b"baffle/salt/2" + record.run + record.nonces).digest()
    assert salt != salt_of(b"another run".ljust(32), statement, record.nonces)
    assert epoch_of(record) == Epoch(0, salt, record.run, statement.chain)
    later = setting.signers.record(replace(statement, epoch=0, first=9))
    assert epoch_of(later).first == 9
    assert epoch_of(later).salt != salt


@given(st.data())
def test_any_other_nonces_are_refused(setting: Setting, data: st.DataObject) -> None:
    whole = setting.record.nonces
    assert commitment_to(whole[:32]) == sha256(b"baffle/nonce/2" + whole[:32]).digest()
    with pytest.raises(RefusalError, match="nonces that are not those"):
        salt_of(setting.record.run, setting.statement, whole[32:64] + whole[:32] + whole[64:])
    start, stop = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    other = whole[:start] + data.draw(st.binary(max_size=40)) + whole[stop:]
    if other == whole:
        return
    with pytest.raises(RefusalError, match="nonces that are not those"):
        salt_of(setting.record.run, setting.statement, other)


# Signatures under a statement


def test_an_epoch_that_a_client_has_not_signed_is_refused(setting: Setting) -> None:
    record, statement, directory = setting.record, setting.statement, setting.signers.directory
    require_signed_by_all(record, statement, directory)
    spoilt = record.signatures[: 64 * 2] + bytes(64) + record.signatures[64 * 3 :]
    with pytest.raises(RefusalError, match="client 2 has not signed the statement"):
        require_signed_by_all(replace(record, signatures=spoilt), statement, directory)
    for wrong in (b"", record.signatures[:-1], record.signatures[64:], record.signatures + bytes(64)):
        with pytest.raises(RefusalError, match="bytes of signatures"):
            require_signed_by_all(replace(record, signatures=wrong), statement, directory)
    other = encode(replace(statement, first=1))
    with pytest.raises(RefusalError, match="client 0 has not signed the statement"):
        require_signed_by_all(replace(record, statement=other), statement, directory)
    with pytest.raises(RefusalError, match="client 6 has not signed the statement"):
        require_signed_by_all(record, statement, {client: directory[client] for client in range(6)})


# Certificates and rosters


def test_more_than_two_thirds_certify_one_state_and_nothing_else(setting: Setting) -> None:
    directory = setting.signers.directory

    def signed_by(*signers: int) -> Certificate:
        return setting.signers.certificate(b"r" * 32, 4, b"c" * 32, signers)

    for clients in (1, 2, 3, 6, 7):
        for count in range(clients + 1):
            if 3 * count > 2 * clients:
                require_certified(signed_by(*range(count)), directory, quorum(clients))
                continue
            with pytest.raises(RefusalError, match=f"{count} clients have signed, expected at least"):
                require_certified(signed_by(*range(count)), directory, quorum(clients))
    good = signed_by(0, 1, 3, 5, 6)
    refused: list[tuple[Certificate, str]] = [
        (signed_by(0, 1, 2, 3, 3), "clients have signed"),
        (replace(good, run=bytes(32)), "has not signed the state before round 4"),
        (replace(good, round=5), "has not signed the state before round 5"),
        (replace(good, chain=bytes(32)), "has not signed the state before round 4"),
        (replace(good, signers=(1, 0, 3, 5, 6)), "has not signed the state before round 4"),
        *((replace(good, signatures=bytes(count)), "bytes of signatures") for count in (0, 63, 64 * 4, 64 * 6)),
    ]
    for certificate, why in refused:
        with pytest.raises(RefusalError, match=why):
            require_certified(certificate, directory, quorum(CLIENTS))
    with pytest.raises(RefusalError, match="client 5 has not signed"):
        require_certified(good, {client: key for client, key in directory.items() if client != 5}, quorum(CLIENTS))


def test_a_roster_names_the_server_and_the_clients_and_another_text_is_refused(setting: Setting) -> None:
    roster, known = setting.signers.roster, setting.signers.roster_hash
    assert read_roster_text(roster, known) == (setting.signers.server, setting.signers.directory)
    text = ROSTER_TAG + length_prefixed(b"1", b"", b"server", b"zero", b"", b"", b"", b"two", b"node")
    assert read_roster_text(text, sha256(text).digest()) == (b"server", {0: b"zero", 2: b"two"})
    for other, digest in ((roster + b"\0", known), (roster[:-1], known), (b"another", sha256(b"another").digest())):
        with pytest.raises(RefusalError, match="the text of another roster"):
            read_roster_text(other, digest)
    whole = length_prefixed(b"1", b"2031", b"server")
    for fields in (b"", b"\xff" * 8, length_prefixed(b"1", b"2031"), whole + length_prefixed(b"zero"), whole[:-1]):
        text = ROSTER_TAG + fields
        with pytest.raises(RefusalError, match=r"not whole|middle of a field"):
            read_roster_text(text, sha256(text).digest())
