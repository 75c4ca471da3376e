"""A run is its statement: any other words give another run, and nobody chooses the salt."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baffle.aggregation.context import length_prefixed, state_text
from baffle.core.messages import decode, encode
from baffle.errors import MessageError, RefusalError
from baffle.plan import Plan, RunSettings, parse
from baffle.statement import (
    NOTHING,
    ROSTER_TAG,
    Certificate,
    Commitment,
    EpochRecord,
    Statement,
    commitment_text,
    commitment_to,
    epoch_of,
    epochs_of,
    least_salt,
    read_roster_text,
    read_statement,
    ready_text,
    require_certified,
    require_enough_salt,
    require_signed_by_all,
    require_signed_commitments,
    run_of,
    salt_of,
    shared_plan,
)
from baffle.trajectory import Epoch
from tests.support.statements import Signers

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
    assert run_of(data) == sha256(b"baffle/statement/2" + data).digest() == setting.record.run
    assert read_statement(data) == setting.statement
    assert run_of(data + b"\0") != run_of(data)


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
    "commitments": st.lists(
        st.builds(
            Commitment,
            st.integers(0, 9),
            st.binary(min_size=32, max_size=32),
            st.binary(min_size=64, max_size=64),
        ),
        max_size=3,
        unique_by=lambda one: one.client,
    ).map(lambda some: tuple(sorted(some, key=lambda one: one.client))),
}


def test_the_property_below_covers_every_field() -> None:
    assert {"protocol", *VALUES} == set(Statement.__struct_fields__)


@given(st.sampled_from(sorted(VALUES)), st.data())
@settings(max_examples=200)
def test_any_other_field_gives_another_run(field: str, data: st.DataObject) -> None:
    """So clients that were told different things hold different names."""
    base = Statement(2, "p", b"i" * 32, 7, b"r" * 32, (4, 4), 0, NOTHING, 0, b"c" * 32, ())
    value = data.draw(VALUES[field])
    other = replace(base, **{field: value})
    assert (run_of(encode(other)) == run_of(encode(base))) == (value == getattr(base, field))
    assert read_statement(encode(other)) == other


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("client", 6),
        ("commitment", b"x" * 32),
        ("signature", b"x" * 64),
    ],
)
def test_any_other_commitment_gives_another_run(setting: Setting, field: str, value: object) -> None:
    first, *rest = setting.statement.commitments
    other = replace(setting.statement, commitments=(replace(first, **{field: value}), *rest))
    assert run_of(encode(other)) != setting.record.run


def test_another_protocol_is_refused(setting: Setting) -> None:
    tree = msgspec.msgpack.decode(encode(setting.statement))
    for protocol in (0, 1, 3, "2", None):
        with pytest.raises(MessageError, match="Statement"):
            read_statement(msgspec.msgpack.encode([tree[0], protocol, *tree[2:]]))


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


@pytest.mark.parametrize("field", ["initial", "roster_hash", "previous", "chain"])
@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_hash_of_another_length_is_refused(setting: Setting, field: str, length: int) -> None:
    with pytest.raises(MessageError, match="Statement"):
        read_statement(encode(replace(setting.statement, **{field: bytes(length)})))


def test_a_statement_holds_of_the_run_section_only_what_concerns_clients(tiny: Callable[..., Plan]) -> None:
    plan = tiny(*HONEST, "run.workers=7", "run.snapshot_every=3", "run.deadline_seconds=9", "run.downlink=delta")
    kept = shared_plan(plan)
    assert kept.run == RunSettings(deadline_seconds=9, downlink="delta")
    assert replace(kept, run=plan.run) == plan
    assert parse(kept.to_toml()) == kept
    assert kept.trajectory_digest() == plan.trajectory_digest()


# Commitments and the salt


def test_a_commitment_is_signed_for_one_server_plan_roster_and_epoch() -> None:
    base: dict[str, Any] = {
        "server": b"s" * 32,
        "plan": "plan",
        "roster_hash": b"r" * 32,
        "epoch": 3,
        "commitment": b"c" * 32,
    }
    others = {"server": b"t" * 32, "plan": "plan ", "roster_hash": b"q" * 32, "epoch": 4, "commitment": b"d" * 32}
    texts = {commitment_text(**base), *(commitment_text(**(base | {key: value})) for key, value in others.items())}
    assert len(texts) == 6
    assert all(text.startswith(b"baffle/commitment/2") for text in texts)


def test_signed_commitments_are_taken(setting: Setting) -> None:
    require_signed_commitments(setting.statement, setting.signers.server, setting.signers.directory)


def spoilt_commitments(setting: Setting) -> dict[str, Statement]:
    first, second, *rest = setting.statement.commitments
    swapped = replace(first, signature=second.signature)
    return {
        "of another client": replace(setting.statement, commitments=(swapped, second, *rest)),
        "to another nonce": replace(setting.statement, commitments=(replace(first, commitment=b"n" * 32), *rest)),
        "for another epoch": replace(setting.statement, epoch=1),
        "for another plan": replace(setting.statement, plan=setting.statement.plan + "\n"),
        "for another roster": replace(setting.statement, roster_hash=bytes(32)),
    }


@pytest.mark.parametrize(
    "how",
    ["of another client", "to another nonce", "for another epoch", "for another plan", "for another roster"],
)
def test_a_commitment_that_its_client_has_not_signed_is_refused(setting: Setting, how: str) -> None:
    signers = setting.signers
    with pytest.raises(RefusalError, match="commitment of client 0 is not signed by it"):
        require_signed_commitments(spoilt_commitments(setting)[how], signers.server, signers.directory)


def test_commitments_for_another_server_or_of_strangers_are_refused(setting: Setting) -> None:
    signers = setting.signers
    with pytest.raises(RefusalError, match="commitment of client 0"):
        require_signed_commitments(setting.statement, b"another".ljust(32), signers.directory)
    without = {client: key for client, key in signers.directory.items() if client != 3}
    with pytest.raises(RefusalError, match="commitment of client 3"):
        require_signed_commitments(setting.statement, signers.server, without)
    with pytest.raises(RefusalError, match="commitment of client 3"):
        require_signed_commitments(setting.statement, signers.server, without | {3: b"no key"})


@pytest.mark.parametrize("clients", range(3, 20))
def test_more_than_a_third_salt_a_run_and_more_than_two_thirds_if_the_server_may_lie(
    tiny: Callable[..., Plan], clients: int
) -> None:
    on = tiny("secure.mode=on", f"federation.clients={clients}")
    lying = tiny("secure.mode=malicious-server", f"federation.clients={clients}")
    assert 3 * (least_salt(on) - 1) <= clients < 3 * least_salt(on)
    assert 3 * (least_salt(lying) - 1) <= 2 * clients < 3 * least_salt(lying)


@pytest.mark.parametrize(("mode", "least"), [(HONEST, 3), (MALICIOUS, 5)])
def test_too_few_commitments_are_refused(tiny: Callable[..., Plan], mode: tuple[str, ...], least: int) -> None:
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
    assert epoch_of(record) == Epoch(0, salt)
    later = setting.signers.record(replace(statement, epoch=0, first=9))
    assert epochs_of([record, later]) == (epoch_of(record), epoch_of(later))
    assert epoch_of(later).first == 9
    assert epoch_of(later).salt != salt


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_nonces_in_another_order_are_refused(setting: Setting, order: tuple[int, ...]) -> None:
    statement = setting.signers.statement(setting.plan, bytes(32), bytes(32), salters=range(3))
    nonces = b"".join(setting.signers.nonce(client, 0) for client in order)
    if order == (0, 1, 2):
        assert salt_of(bytes(32), statement, nonces)
        return
    with pytest.raises(RefusalError, match="nonces that are not those of the statement's commitments"):
        salt_of(bytes(32), statement, nonces)


@given(st.data())
def test_any_other_nonces_are_refused(setting: Setting, data: st.DataObject) -> None:
    whole = setting.record.nonces
    start, stop = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    other = whole[:start] + data.draw(st.binary(max_size=40)) + whole[stop:]
    if other == whole:
        return
    with pytest.raises(RefusalError, match="nonces that are not those"):
        salt_of(setting.record.run, setting.statement, other)


def test_a_commitment_hides_its_nonce_and_holds_for_no_other() -> None:
    assert commitment_to(b"n" * 32) == sha256(b"baffle/nonce/2" + b"n" * 32).digest()
    assert len({commitment_to(bytes([byte]) * 32) for byte in range(256)}) == 256


# Signatures under a statement


def test_an_epoch_is_signed_by_every_client_that_it_names(setting: Setting) -> None:
    require_signed_by_all(setting.record, setting.statement, setting.signers.directory)


def test_an_epoch_that_a_client_has_not_signed_is_refused(setting: Setting) -> None:
    record, statement, directory = setting.record, setting.statement, setting.signers.directory
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


def test_what_is_signed_for_one_purpose_serves_no_other(setting: Setting) -> None:
    run = setting.record.run
    texts = [ready_text(run), state_text(run, 0, bytes(32)), commitment_text(run, "", run, 0, run)]
    assert len({text.split(b"/2")[0] for text in texts}) == 3


# Certificates


@pytest.fixture(scope="module")
def certificate(setting: Setting) -> Certificate:
    return setting.signers.certificate(b"r" * 32, 4, b"c" * 32, (0, 1, 3, 5, 6))


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7])
def test_more_than_two_thirds_certify_a_state(setting: Setting, clients: int) -> None:
    for count in range(clients + 1):
        certificate = setting.signers.certificate(b"r" * 32, 4, b"c" * 32, range(count))
        if 3 * count > 2 * clients:
            require_certified(certificate, setting.signers.directory, clients)
            continue
        with pytest.raises(RefusalError, match=f"{count} clients have signed, expected at least"):
            require_certified(certificate, setting.signers.directory, clients)


def test_a_client_counts_once(setting: Setting) -> None:
    twice = setting.signers.certificate(b"r" * 32, 4, b"c" * 32, (0, 1, 2, 3, 3))
    with pytest.raises(RefusalError, match="clients have signed"):
        require_certified(twice, setting.signers.directory, CLIENTS)


@pytest.mark.parametrize(
    "change", [{"run": bytes(32)}, {"round": 5}, {"chain": bytes(32)}, {"signers": (1, 0, 3, 5, 6)}]
)
def test_a_certificate_of_anything_else_is_refused(
    setting: Setting, certificate: Certificate, change: dict[str, object]
) -> None:
    require_certified(certificate, setting.signers.directory, CLIENTS)
    with pytest.raises(RefusalError, match="has not signed the state before round"):
        require_certified(replace(certificate, **change), setting.signers.directory, CLIENTS)


def test_strangers_certify_nothing(setting: Setting, certificate: Certificate) -> None:
    known = {client: key for client, key in setting.signers.directory.items() if client != 5}
    with pytest.raises(RefusalError, match="client 5 has not signed"):
        require_certified(certificate, known, CLIENTS)


@pytest.mark.parametrize("signatures", [b"", bytes(63), bytes(64 * 4), bytes(64 * 6)])
def test_a_certificate_has_one_signature_for_each_signer(
    setting: Setting, certificate: Certificate, signatures: bytes
) -> None:
    with pytest.raises(RefusalError, match="bytes of signatures"):
        require_certified(replace(certificate, signatures=signatures), setting.signers.directory, CLIENTS)


# Rosters


def test_a_roster_names_the_server_and_the_clients(setting: Setting) -> None:
    signers = setting.signers
    assert read_roster_text(signers.roster, signers.roster_hash) == (signers.server, signers.directory)


def test_an_empty_place_has_no_client() -> None:
    text = ROSTER_TAG + length_prefixed(b"1", b"", b"server", b"zero", b"", b"", b"", b"two", b"node")
    assert read_roster_text(text, sha256(text).digest()) == (b"server", {0: b"zero", 2: b"two"})


@pytest.mark.parametrize("text", [b"", ROSTER_TAG[:-1] + b"1", b"another"])
def test_the_text_of_another_roster_is_refused(setting: Setting, text: bytes) -> None:
    for some in (text, setting.signers.roster + b"\0", setting.signers.roster[:-1]):
        with pytest.raises(RefusalError, match="the text of another roster"):
            read_roster_text(some, setting.signers.roster_hash)
    with pytest.raises(RefusalError, match="the text of another roster"):
        read_roster_text(text, sha256(text).digest())


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        bytes(7),
        b"\xff" * 8,
        length_prefixed(b"1", b"2031"),
        length_prefixed(b"1", b"2031", b"server", b"zero"),
        length_prefixed(b"1", b"2031", b"server")[:-1],
        length_prefixed(b"1", b"2031", b"server") + b"\0",
    ],
)
def test_a_roster_that_is_not_whole_is_refused(fields: bytes) -> None:
    text = ROSTER_TAG + fields
    with pytest.raises(RefusalError, match=r"not whole|middle of a field"):
        read_roster_text(text, sha256(text).digest())
