"""The journal of a networked run: its statements and certificates verify, and whatever is changed is named."""

import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baffle.aggregation.context import length_prefixed
from baffle.core.messages import encode
from baffle.core.state import chain_epoch, chain_start
from baffle.errors import BaffleError, ChainError
from baffle.journal.audit import verify
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Plan
from baffle.statement import ROSTER_TAG, Certificate, EpochRecord, read_statement, ready_text, run_of
from tests.support.journals import change, read, refused, with_bit_flipped
from tests.support.statements import N, NetworkedRun, Signers, changed

CLIENTS = 4


@pytest.fixture(scope="module")
def plan(tiny: Callable[..., Plan]) -> Plan:
    return tiny("ring.n_max=20", f"federation.clients={CLIENTS}", "secure.mode=malicious-server")


class Original:
    """A sound run, of which each test gets a copy."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.run = NetworkedRun(plan, folder)
        self.folder, self.signers = self.run.whole(), self.run.signers
        with Journal.open(folder / "journal.sqlite") as journal:
            self.epochs = journal.statements.epochs()
            self.certificates = journal.statements.certificates()


@pytest.fixture(scope="module")
def original(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(plan, tmp_path_factory.mktemp("networked") / "run")


@pytest.fixture
def run(original: Original, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original.folder, tmp_path / "run"))


def _put_epoch(run: Path, number: int, record: EpochRecord) -> None:
    values = (record.statement, record.nonces, record.signatures, number)
    change(run, "UPDATE epochs SET statement = ?, nonces = ?, signatures = ? WHERE epoch = ?", *values)


def _put_certificate(run: Path, certificate: Certificate) -> None:
    row = certificate.round, certificate.run, encode(certificate)
    change(run, "INSERT OR REPLACE INTO certificates VALUES (?, ?, ?)", *row)


# A sound run


def test_a_run_of_version_2_of_the_protocol_verifies(plan: Plan, tmp_path: Path) -> None:
    earlier = NetworkedRun(plan, tmp_path / "run", protocol=2)
    folder = earlier.whole()
    assert verify(folder).chain == earlier.present.chain.hex()
    with Journal.open(folder / "journal.sqlite") as journal:
        (first, *_) = journal.statements.epochs()
    assert first.run == sha256(b"baffle/statement/2" + first.statement).digest()


def test_evidence_that_nobody_has_signed_is_named(original: Original, run: Path) -> None:
    *_, last = original.epochs  # without the last client
    accused = original.signers.commitment(read_statement(last.statement).plan, CLIENTS - 1, 2)
    for signature, words in ((bytes(64), "is not signed by it"), (accused.signature, "has not signed the statement")):
        forged = changed(last, unopened=(msgspec.structs.replace(accused, signature=signature),))
        _put_epoch(run, 2, EpochRecord(forged, last.nonces, last.signatures))
        with pytest.raises(BaffleError, match=words):
            verify(run)


def test_a_networked_run_verifies_and_a_server_that_resumes_comes_to_the_same_place(
    original: Original, run: Path
) -> None:
    verified, last = verify(run), original.run.present
    assert (verified.rounds, verified.skipped, verified.n_weights) == (5, 0, N)
    assert (verified.chain, verified.weights_sha256) == (last.chain.hex(), last.state.weights_hash().hex())
    with Journal.open(run / "journal.sqlite") as journal:
        assert journal.snapshot_numbers() == [0, 3]
        lineage = lineage_of(journal, journal.plan())
        present = catch_up(journal, lineage)
    assert lineage.epochs == original.run.lineage.epochs
    assert (present.round, present.chain, present.state.digest()) == (last.round, last.chain, last.state.digest())


def test_what_is_kept_is_read_back_and_the_chain_holds_the_statements(original: Original) -> None:
    first, second, third = (read_statement(record.statement) for record in original.epochs)
    assert [first.epoch, second.epoch, third.epoch] == [0, 1, 2]
    assert [certificate.round for certificate in original.certificates] == [3, 5]
    with Journal.open(original.folder / "journal.sqlite") as journal:
        assert journal.statements.networked
        assert {roster for _, roster in journal.statements.epochs_with_rosters()} == {original.signers.roster}
        assert journal.statements.epoch_began() == 3
        assert journal.participation.contributors(0) == set(range(CLIENTS))
        before = journal.entry(2).chain
    assert first.chain == chain_start(original.run.lineage.trajectory.digest, original.run.initial)
    assert (second.chain, third.chain) == (before, chain_epoch(before, original.epochs[1].run))
    assert (second.previous, third.previous) == (original.epochs[0].run, original.epochs[1].run)


def test_a_run_without_certificates_verifies(run: Path) -> None:
    """In mode `on` clients do not sign states."""
    change(run, "DELETE FROM certificates")
    assert verify(run).rounds == 5


def test_a_certificate_may_be_signed_before_or_after_the_links_of_epochs(original: Original, run: Path) -> None:
    """The clients of an epoch that ends sign the state without the next link; those of the next epoch sign with it."""
    chains = original.run.lineage.chains(3, original.certificates[0].chain)
    assert len(chains) == 3
    for chain in chains:
        _put_certificate(run, original.signers.certificate(original.epochs[1].run, 3, chain, range(CLIENTS)))
        assert verify(run).rounds == 5


def test_rounds_that_no_client_agreed_to_are_refused(plan: Plan, tmp_path: Path) -> None:
    """More rounds than a statement's plan has need another epoch."""
    run = NetworkedRun(plan, tmp_path / "run")
    run.begin()
    run.play(plan.rounds)
    run.journal.commit()
    assert verify(tmp_path / "run").rounds == plan.rounds
    run.play(1)
    with pytest.raises(ChainError, match=f"{plan.rounds + 1} rounds, but epoch 0 was to end with {plan.rounds}"):
        verify(tmp_path / "run")


def test_an_epoch_keeps_the_state_that_it_begins_with(plan: Plan, tmp_path: Path) -> None:
    """Clients that come from elsewhere begin with it, however many snapshots follow."""
    run = NetworkedRun(plan, tmp_path / "run")
    run.begin()
    run.play(2)
    run.begin()
    for _ in range(4):
        present = run.present
        outcome = run.outcome(present.round)
        run.present = run.lineage.advance(present, encode(outcome))
        run.journal.append(present.chain, outcome, run.present.state, snapshot=True)
    assert run.journal.snapshot_numbers() == [0, 2, 5, 6]
    run.journal.close()
    assert verify(tmp_path / "run").rounds == 6


def test_an_epoch_is_durable_before_its_salt_is_revealed(plan: Plan, tmp_path: Path) -> None:
    run = NetworkedRun(plan, tmp_path / "run")
    assert (run.journal.statements.epochs(), run.journal.statements.epoch_began()) == ([], 0)
    assert verify(tmp_path / "run").rounds == 0
    record = run.begin()
    with Journal.open(tmp_path / "run" / "journal.sqlite") as again:
        assert again.statements.epochs() == [record]
    run.journal.close()


def test_a_simulation_has_neither_statements_nor_certificates(finished_run: Path) -> None:
    with Journal.open(finished_run / "journal.sqlite") as journal:
        of_networks = journal.statements
        assert (of_networks.networked, of_networks.epochs(), of_networks.certificates()) == (False, [], [])
        assert (of_networks.epoch_began(), lineage_of(journal, journal.plan()).epochs) == (0, ())


# Statements that do not follow from each other


def test_a_changed_statement_is_refused(original: Original, run: Path) -> None:
    """Whatever is changed, the run has another name, which no client has signed."""
    unsigned = "the statement of epoch 0 does not hold: client 0 has not signed the statement"
    change(run, "DELETE FROM epochs WHERE epoch > 0")
    record = original.epochs[0]
    another_plan = read_statement(record.statement).plan.replace("seed = 0", "seed = 1", 1)
    for field, value, why in (
        ("plan", another_plan, "the statement of epoch 0 is about another plan than the journal"),
        ("first", 1, "the first epoch begins with round 1, expected 0"),
        ("roster", 8, unsigned),
        ("tiers", (1,) * CLIENTS, unsigned),
        ("initial", bytes(32), unsigned),
        ("chain", bytes(32), unsigned),
    ):
        _put_epoch(run, 0, EpochRecord(changed(record, **{field: value}), record.nonces, record.signatures))
        refused(run, why)


def test_a_statement_with_other_commitments_is_refused(original: Original, run: Path) -> None:
    record = original.epochs[0]
    first, *rest = read_statement(record.statement).commitments
    change(run, "DELETE FROM epochs WHERE epoch > 0")
    fewer = EpochRecord(changed(record, commitments=tuple(rest)), record.nonces[32:], record.signatures[64:])
    _put_epoch(run, 0, fewer)
    refused(run, "client 1 has not signed the statement")
    swapped = changed(record, commitments=(type(first)(0, first.commitment, rest[0].signature), *rest))
    _put_epoch(run, 0, EpochRecord(swapped, record.nonces, record.signatures))
    refused(run, "statement of epoch 0 does not hold: the statement's commitment of client 0 is not signed by it")


def test_too_few_commitments_are_refused_even_if_all_is_signed(plan: Plan, tmp_path: Path) -> None:
    run = NetworkedRun(plan, tmp_path / "run")
    run.begin(salters=[1, 2])
    run.journal.close()
    refused(tmp_path / "run", "statement of epoch 0 does not hold: 2 clients have committed.*at least 3")


def test_what_is_no_statement_or_has_no_plan_is_refused(original: Original, run: Path) -> None:
    plans = [changed(original.epochs[1], plan=text) for text in ("", "nonsense", "seed = 'x'", "[" * 10_000)]
    for statement in (b"", b"\xc1", b"\x91" * 10_000, bytes(100), *plans):
        change(run, "UPDATE epochs SET statement = ? WHERE epoch = 1", statement)
        refused(run, "the statement of epoch 1 (cannot be read|is about another plan)")
    for column, value in (("statement", "text"), ("nonces", 7), ("signatures", 0.5), ("roster", "text")):
        change(run, f"UPDATE epochs SET {column} = ? WHERE epoch = 1", value)
        refused(run, "an epoch is not bytes")


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("DELETE FROM epochs WHERE epoch = 0", "the statement of epoch 0 does not follow from the one before"),
        ("DELETE FROM epochs WHERE epoch = 1", "the statement of epoch 1 does not follow from the one before"),
        ("DELETE FROM epochs WHERE epoch = 2", "round 3"),
        ("DELETE FROM epochs", "round 0"),
        ("UPDATE epochs SET epoch = 9 WHERE epoch = 1", "the statement of epoch 1 does not follow from the one before"),
    ],
)
def test_missing_and_swapped_epochs_are_noticed(run: Path, statement: str, why: str) -> None:
    change(run, statement)
    refused(run, why)


def test_an_epoch_with_another_past_is_refused(original: Original, run: Path) -> None:
    """Even with every client's signature it does not fit into the chain."""
    follow = "the statement of epoch 2 does not follow from the one before"
    past = "the epoch that begins with round 3 names another past"
    for name, value, why in (
        ("chain", bytes(32), past),
        ("chain", read_statement(original.epochs[1].statement).chain, past),
        ("previous", original.epochs[0].run, follow),
        ("first", 2, follow),
    ):
        other = read_statement(changed(original.epochs[2], **{name: value}))
        _put_epoch(run, 2, original.signers.record(other))
        refused(run, why)


def test_an_epoch_that_begins_with_other_weights_is_refused(plan: Plan, tmp_path: Path) -> None:
    """The clients have signed other initial weights than those of the journal."""
    run = NetworkedRun(plan, tmp_path / "run")
    statement = run.signers.statement(plan, bytes(32), run.present.chain)
    run.journal.add_epoch(run.signers.record(statement), run.signers.roster, run.initial)
    run.journal.close()
    with pytest.raises(ChainError, match="statement of epoch 0 begins with other weights than the journal"):
        verify(tmp_path / "run")


# Nonces, signatures, rosters

UNSIGNED = "the statement of epoch 2 does not hold: .*client 0 has not signed the statement"
NO_SIGNATURES = "the statement of epoch 2 does not hold: .*bytes of signatures"
OTHER_NONCES = "the salt of an epoch does not follow from its statement: nonces that are not those"
OTHER_ROSTER = "the statement of epoch 1 does not hold: the text of another roster"


@pytest.mark.parametrize(
    ("column", "epoch", "spoil", "why"),
    [
        *(("nonces", epoch, lambda old: bytes(32) + old[32:], OTHER_NONCES) for epoch in (0, 2)),
        *(("nonces", 2, spoil, OTHER_NONCES) for spoil in (lambda old: old[32:], lambda old: old + bytes(32))),
        *(("signatures", 2, spoil, NO_SIGNATURES) for spoil in (lambda _: b"", lambda old: old[64:])),
        ("signatures", 2, lambda old: bytes(64) + old[64:], UNSIGNED),
        ("signatures", 2, lambda old: old[64:128] + old[64:], UNSIGNED),
        *(("roster", 1, lambda _, text=text: text, OTHER_ROSTER) for text in (b"", ROSTER_TAG)),
        ("roster", 1, lambda _: ROSTER_TAG + length_prefixed(b"7", b"", b"s"), OTHER_ROSTER),
    ],
)
def test_other_nonces_signatures_and_rosters_are_refused(
    run: Path, column: str, epoch: int, spoil: Callable[[bytes], bytes], why: str
) -> None:
    old = read(run, f"SELECT {column} FROM epochs WHERE epoch = {epoch}")
    change(run, f"UPDATE epochs SET {column} = ? WHERE epoch = ?", spoil(old), epoch)
    refused(run, why)


def test_a_signature_by_another_key_is_refused(original: Original, run: Path) -> None:
    forger = Signers(CLIENTS)
    record = original.epochs[0]
    signatures = b"".join(identity.sign(ready_text(record.run)) for identity in forger.identities)
    change(run, "UPDATE epochs SET signatures = ? WHERE epoch = 0", signatures)
    refused(run, "the statement of epoch 0 does not hold: client 0 has not signed the statement")
    change(run, "UPDATE epochs SET roster = ? WHERE epoch = 0", forger.roster)
    refused(run, "the statement of epoch 0 does not hold: the text of another roster")


def test_a_statement_that_names_no_whole_roster_is_refused(plan: Plan, tmp_path: Path) -> None:
    run = NetworkedRun(plan, tmp_path / "run")
    run.signers.roster = ROSTER_TAG + length_prefixed(b"7", b"")
    run.signers.roster_hash = sha256(run.signers.roster).digest()
    run.begin()
    run.journal.close()
    refused(tmp_path / "run", "the statement of epoch 0 does not hold: a roster that is not whole")


# Certificates


def test_a_certificate_about_another_state_is_refused(original: Original, run: Path) -> None:
    """It is evidence against a server that shows clients different histories: they have signed a state that the journal
    does not hold."""
    late = original.certificates[1]
    for chain in (b"another history".ljust(32), late.chain):
        _put_certificate(run, original.signers.certificate(late.run, 3, chain, range(CLIENTS)))
        fault = refused(run, "clients have signed another state before round 3")
        assert isinstance(fault, ChainError)
        assert fault.round_number == 3


def test_a_certificate_needs_the_signatures_of_enough_clients_of_its_run(original: Original, run: Path) -> None:
    sound, signers = original.certificates[1], original.signers
    for by, name, clients, why in (
        (signers, sound.run, 2, "does not hold: 2 clients have signed, expected at least 3"),
        (Signers(CLIENTS), sound.run, 4, "does not hold: client 0 has not signed the state before round 5"),
        (signers, run_of(b"another"), 4, "belongs to another run"),
    ):
        change(run, "DELETE FROM certificates WHERE round = 5")
        _put_certificate(run, by.certificate(name, sound.round, sound.chain, range(clients)))
        refused(run, f"the certificate before round 5 {why}")
    change(run, "DELETE FROM certificates WHERE round = 5")
    _put_certificate(run, signers.certificate(sound.run, sound.round, sound.chain, range(3)))
    assert verify(run).rounds == 5


def test_a_certificate_about_rounds_that_are_missing_is_refused(original: Original, run: Path) -> None:
    sound = original.certificates[1]
    _put_certificate(run, original.signers.certificate(sound.run, 6, sound.chain, range(CLIENTS)))
    refused(run, "a certificate is about the state before round 6; the journal has no such state")
    change(run, "DELETE FROM certificates WHERE round = 6")
    change(run, "DELETE FROM rounds WHERE round = 4")
    refused(run, "a certificate is about the state before round 5; the journal has no such state")


def test_what_is_no_certificate_is_refused(run: Path) -> None:
    for record in (b"", b"\xc1", b"\x91" * 10_000, "text", 7):
        change(run, "UPDATE certificates SET record = ? WHERE round = 5", record)
        refused(run, "a certificate cannot be read")


def test_a_newer_certificate_replaces_the_one_before(plan: Plan, tmp_path: Path) -> None:
    run = NetworkedRun(plan, tmp_path / "run")
    run.begin()
    run.certify([0, 1, 2])
    newer = run.certify([1, 2, 3])
    assert run.journal.statements.certificates() == [newer]
    run.journal.close()
    assert verify(tmp_path / "run").rounds == 0


def test_each_epoch_that_meets_at_a_round_has_a_certificate_of_its_own(plan: Plan, tmp_path: Path) -> None:
    """The clients of the epoch that ends and those of the next one; either may be wrong."""
    run = NetworkedRun(plan, tmp_path / "run")
    run.begin()
    run.play(1)
    last = run.certify()
    run.begin()
    first = run.certify()
    kept = run.journal.statements.certificates()
    run.journal.close()
    assert sorted(map(encode, kept)) == sorted(map(encode, (last, first)))
    assert verify(tmp_path / "run").rounds == 1
    for sound in (last, first):
        _put_certificate(tmp_path / "run", run.signers.certificate(sound.run, 1, bytes(32), range(CLIENTS)))
        refused(tmp_path / "run", "clients have signed another state before round 1")
        _put_certificate(tmp_path / "run", sound)


# Anything at all


@pytest.mark.parametrize(
    ("table", "key", "column"),
    [
        *(("epochs", "epoch", column) for column in ("statement", "nonces", "signatures", "roster")),
        ("certificates", "round", "record"),
    ],
)
def test_any_changed_byte_of_what_was_signed_is_noticed(run: Path, table: str, key: str, column: str) -> None:
    draw = np.random.default_rng(0)
    newest = f"WHERE {key} = (SELECT max({key}) FROM {table})"
    data = read(run, f"SELECT {column} FROM {table} {newest}")
    for _ in range(10):
        spoilt = with_bit_flipped(data, int(draw.integers(len(data))), 1 << int(draw.integers(8)))
        change(run, f"UPDATE {table} SET {column} = ? {newest}", spoilt)
        with pytest.raises(BaffleError):
            verify(run)
    change(run, f"UPDATE {table} SET {column} = ? {newest}", data)
    assert verify(run).rounds == 5
