"""The journal of a networked run: its statements and certificates verify, and whatever is changed is named."""

import shutil
import sqlite3
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from baffle.aggregation.context import length_prefixed
from baffle.core.chain import chain_epoch, chain_start
from baffle.core.messages import encode
from baffle.core.state import pack
from baffle.errors import BaffleError, ChainError, JournalError
from baffle.journal.audit import verify
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Plan, parse
from baffle.statement import ROSTER_TAG, Certificate, EpochRecord, read_statement, ready_text, run_of
from tests.support.statements import N, NetworkedRun, Signers, changed

CLIENTS = 4


@pytest.fixture(scope="module")
def plan(tiny: Callable[..., Plan]) -> Plan:
    return tiny("ring.n_max=20", f"federation.clients={CLIENTS}", "secure.mode=malicious-server")


class Original:
    """A sound run, of which each test gets a copy."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.run = NetworkedRun(plan, folder)
        self.folder = self.run.whole()
        with Journal.open(folder / "journal.sqlite") as journal:
            self.epochs = journal.statements.epochs()
            self.certificates = journal.statements.certificates()

    @property
    def signers(self) -> Signers:
        return self.run.signers


@pytest.fixture(scope="module")
def original(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(plan, tmp_path_factory.mktemp("networked") / "run")


@pytest.fixture
def run(original: Original, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original.folder, tmp_path / "run"))


def _change(run: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(run / "journal.sqlite")
    db.execute(statement, values)
    db.commit()
    db.close()


def _put_epoch(run: Path, number: int, record: EpochRecord) -> None:
    values = (record.statement, record.nonces, record.signatures, number)
    _change(run, "UPDATE epochs SET statement = ?, nonces = ?, signatures = ? WHERE epoch = ?", *values)


def _put_certificate(run: Path, certificate: Certificate) -> None:
    row = certificate.round, certificate.run, encode(certificate)
    _change(run, "INSERT OR REPLACE INTO certificates VALUES (?, ?, ?)", *row)


# A sound run


def test_a_networked_run_verifies(original: Original, run: Path) -> None:
    verified = verify(run)
    assert (verified.rounds, verified.skipped, verified.n_weights) == (5, 0, N)
    assert verified.chain == original.run.present.chain.hex()
    assert verified.weights_sha256 == original.run.present.state.weights_hash().hex()


def test_a_server_that_resumes_comes_to_the_same_place(original: Original, run: Path) -> None:
    with Journal.open(run / "journal.sqlite") as journal:
        assert journal.snapshot_numbers() == [0, 3]
        lineage = lineage_of(journal, journal.plan())
        present = catch_up(journal, lineage)
    assert tuple(lineage.links) == original.run.lineage.links
    assert lineage.trajectory.epochs == original.run.lineage.trajectory.epochs
    assert (present.round, present.chain) == (original.run.present.round, original.run.present.chain)
    assert present.state.digest() == original.run.present.state.digest()


def test_the_chain_holds_the_statements(original: Original) -> None:
    beginning = chain_start(original.run.lineage.trajectory.digest, original.run.initial)
    first = read_statement(original.epochs[0].statement)
    assert first.chain == beginning
    with Journal.open(original.folder / "journal.sqlite") as journal:
        before = journal.entry(2).chain
    second, third = (read_statement(record.statement) for record in original.epochs[1:])
    assert second.chain == before
    assert third.chain == chain_epoch(before, original.epochs[1].run)
    assert (second.previous, third.previous) == (original.epochs[0].run, original.epochs[1].run)


def test_what_is_kept_is_read_back(original: Original) -> None:
    assert [read_statement(record.statement).epoch for record in original.epochs] == [0, 1, 2]
    assert [certificate.round for certificate in original.certificates] == [3, 5]
    with Journal.open(original.folder / "journal.sqlite") as journal:
        assert journal.statements.networked
        assert {roster for _, roster in journal.statements.epochs_with_rosters()} == {original.signers.roster}
        assert journal.statements.epoch_began() == 3
        assert journal.participation.contributors(0) == set(range(CLIENTS))


def test_a_run_without_certificates_verifies(run: Path) -> None:
    """In mode `on` nobody signs states."""
    _change(run, "DELETE FROM certificates")
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


def test_a_journal_that_was_just_made_has_no_epoch(plan: Plan, tmp_path: Path) -> None:
    run = NetworkedRun(plan, tmp_path / "run")
    assert run.journal.statements.epochs() == []
    assert run.journal.statements.epoch_began() == 0
    run.journal.close()
    assert verify(tmp_path / "run").rounds == 0


def test_a_simulation_has_neither_statements_nor_certificates(finished_run: Path) -> None:
    with Journal.open(finished_run / "journal.sqlite") as journal:
        assert not journal.statements.networked
        assert journal.statements.epochs() == []
        assert journal.statements.certificates() == []
        assert journal.statements.epoch_began() == 0
        assert lineage_of(journal, journal.plan()).links == []


def test_an_epoch_is_durable_before_anybody_learns_its_salt(plan: Plan, tmp_path: Path) -> None:
    run = NetworkedRun(plan, tmp_path / "run")
    record = run.begin()
    with Journal.open(tmp_path / "run" / "journal.sqlite") as again:
        assert again.statements.epochs() == [record]
    run.journal.close()


# Statements that do not follow from each other


def _refused(run: Path, why: str) -> None:
    with pytest.raises(JournalError, match=why):
        verify(run)


def test_a_changed_statement_is_refused(original: Original, run: Path) -> None:
    """Whatever is changed, the run has another name, and nobody has signed that."""
    unsigned = "the statement of epoch 0 does not hold: client 0 has not signed the statement"
    _change(run, "DELETE FROM epochs WHERE epoch > 0")
    record = original.epochs[0]
    for field, value, why in (
        ("first", 1, "the first epoch begins with round 1, expected 0"),
        ("roster", 8, unsigned),
        ("tiers", (1,) * CLIENTS, unsigned),
        ("initial", bytes(32), unsigned),
        ("chain", bytes(32), unsigned),
    ):
        _put_epoch(run, 0, EpochRecord(changed(record, **{field: value}), record.nonces, record.signatures))
        _refused(run, why)


def test_a_statement_with_other_commitments_is_refused(original: Original, run: Path) -> None:
    record = original.epochs[0]
    first, *rest = read_statement(record.statement).commitments
    _change(run, "DELETE FROM epochs WHERE epoch > 0")
    fewer = EpochRecord(changed(record, commitments=tuple(rest)), record.nonces[32:], record.signatures[64:])
    _put_epoch(run, 0, fewer)
    _refused(run, "client 1 has not signed the statement")
    swapped = changed(record, commitments=(type(first)(0, first.commitment, rest[0].signature), *rest))
    _put_epoch(run, 0, EpochRecord(swapped, record.nonces, record.signatures))
    _refused(run, "statement of epoch 0 does not hold: the statement's commitment of client 0 is not signed by it")


def test_too_few_commitments_are_refused_even_if_all_is_signed(plan: Plan, tmp_path: Path) -> None:
    run = NetworkedRun(plan, tmp_path / "run")
    run.begin(salters=[1, 2])
    run.journal.close()
    _refused(tmp_path / "run", "statement of epoch 0 does not hold: 2 clients have committed.*at least 3")


def test_a_statement_about_another_plan_is_refused(original: Original, run: Path) -> None:
    text = read_statement(original.epochs[0].statement).plan.replace("seed = 0", "seed = 1", 1)
    assert parse(text).seed == 1
    other = EpochRecord(changed(original.epochs[0], plan=text), original.epochs[0].nonces, b"")
    _put_epoch(run, 0, other)
    _change(run, "DELETE FROM epochs WHERE epoch > 0")
    _refused(run, "the statement of epoch 0 is about another plan than the journal")


@pytest.mark.parametrize("text", ["", "nonsense", "seed = 'x'", "[" * 10_000])
def test_a_statement_whose_plan_cannot_be_read_is_refused(original: Original, run: Path, text: str) -> None:
    record = original.epochs[1]
    _put_epoch(run, 1, EpochRecord(changed(record, plan=text), record.nonces, record.signatures))
    _refused(run, "the statement of epoch 1 (cannot be read|is about another plan)")


@pytest.mark.parametrize("statement", [b"", b"\xc1", b"\x91" * 10_000, bytes(100)])
def test_what_is_no_statement_is_refused(run: Path, statement: bytes) -> None:
    _change(run, "UPDATE epochs SET statement = ? WHERE epoch = 1", statement)
    _refused(run, "the statement of epoch 1 cannot be read")


@pytest.mark.parametrize("column", ["statement", "nonces", "signatures", "roster"])
@pytest.mark.parametrize("value", ["text", 7, 0.5])
def test_what_is_not_bytes_is_refused(run: Path, column: str, value: object) -> None:
    _change(run, f"UPDATE epochs SET {column} = ? WHERE epoch = 1", value)
    _refused(run, "an epoch is not bytes")


def test_epochs_in_another_order_are_refused(run: Path) -> None:
    for old, new in ((1, 9), (2, 1), (9, 2)):
        _change(run, "UPDATE epochs SET epoch = ? WHERE epoch = ?", new, old)
    _refused(run, "the statement of epoch 1 does not follow from the one before")


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_missing_epoch_is_noticed(run: Path, epoch: int) -> None:
    _change(run, "DELETE FROM epochs WHERE epoch = ?", epoch)
    _refused(run, f"the statement of epoch {epoch} does not follow from the one before")


def test_without_its_last_epoch_a_run_does_not_verify(run: Path) -> None:
    _change(run, "DELETE FROM epochs WHERE epoch = 2")
    with pytest.raises(ChainError, match="round 3") as refused:
        verify(run)
    assert refused.value.round_number == 3


def test_without_any_epoch_a_run_does_not_verify(run: Path) -> None:
    _change(run, "DELETE FROM epochs")
    with pytest.raises(ChainError, match="round 0"):
        verify(run)


def test_an_epoch_with_another_past_is_refused(original: Original, run: Path) -> None:
    """A server that has it signed by everybody still cannot bring it into the chain."""
    signers = original.signers
    for change in ({"chain": bytes(32)}, {"chain": read_statement(original.epochs[1].statement).chain}):
        other = signers.record(read_statement(changed(original.epochs[2], **change)))
        _put_epoch(run, 2, other)
        _refused(run, "the epoch that begins with round 3 names another past")
    other = signers.record(read_statement(changed(original.epochs[2], previous=original.epochs[0].run)))
    _put_epoch(run, 2, other)
    _refused(run, "the statement of epoch 2 does not follow from the one before")
    other = signers.record(read_statement(changed(original.epochs[2], first=2)))
    _put_epoch(run, 2, other)
    _refused(run, "the statement of epoch 2 does not follow from the one before")


def test_an_epoch_that_begins_with_other_weights_is_refused(plan: Plan, tmp_path: Path) -> None:
    """Clients that were told of other initial weights than the journal holds."""
    run = NetworkedRun(plan, tmp_path / "run")
    statement = run.signers.statement(plan, bytes(32), run.present.chain)
    run.journal.add_epoch(run.signers.record(statement), run.signers.roster, run.initial)
    run.journal.close()
    with pytest.raises(ChainError, match="statement of epoch 0 begins with other weights than the journal"):
        verify(tmp_path / "run")


def test_other_initial_weights_are_refused(original: Original, run: Path) -> None:
    state = original.run.lineage.trajectory.rule.start(np.zeros(N, np.float32))
    _change(run, "UPDATE snapshots SET state = ? WHERE round = 0", pack(state))
    _refused(run, "statement of epoch 0 begins with other weights than the journal")


# Nonces, signatures, rosters


@pytest.mark.parametrize(
    "spoil", [lambda n: bytes(32) + n[32:], lambda n: n[32:], lambda n: n + bytes(32), lambda _: b""]
)
@pytest.mark.parametrize("epoch", [0, 2])
def test_other_nonces_are_refused(original: Original, run: Path, epoch: int, spoil: Callable[[bytes], bytes]) -> None:
    _change(run, "UPDATE epochs SET nonces = ? WHERE epoch = ?", spoil(original.epochs[epoch].nonces), epoch)
    _refused(run, "the salt of an epoch does not follow from its statement: nonces that are not those")


def test_missing_or_wrong_signatures_are_refused(original: Original, run: Path) -> None:
    signatures = original.epochs[2].signatures
    for spoilt, why in {
        b"": "0 bytes of signatures",
        signatures[64:]: "bytes of signatures",
        bytes(64) + signatures[64:]: "client 0 has not signed the statement",
        signatures[64:128] + signatures[64:]: "client 0 has not signed the statement",
        original.epochs[0].signatures[: len(signatures)]: "client 0 has not signed the statement",
    }.items():
        _change(run, "UPDATE epochs SET signatures = ? WHERE epoch = 2", spoilt)
        _refused(run, f"the statement of epoch 2 does not hold: .*{why}")


def test_a_signature_by_another_key_is_refused(original: Original, run: Path) -> None:
    forger = Signers(CLIENTS)
    record = original.epochs[0]
    signatures = b"".join(identity.sign(ready_text(record.run)) for identity in forger.identities)
    _change(run, "UPDATE epochs SET signatures = ? WHERE epoch = 0", signatures)
    _refused(run, "the statement of epoch 0 does not hold: client 0 has not signed the statement")
    _change(run, "UPDATE epochs SET roster = ? WHERE epoch = 0", forger.roster)
    _refused(run, "the statement of epoch 0 does not hold: the text of another roster")


@pytest.mark.parametrize("roster", [b"", b"text", ROSTER_TAG, ROSTER_TAG + length_prefixed(b"7", b"", b"s")])
def test_the_text_of_another_roster_is_refused(run: Path, roster: bytes) -> None:
    _change(run, "UPDATE epochs SET roster = ? WHERE epoch = 1", roster)
    _refused(run, "the statement of epoch 1 does not hold: the text of another roster")


def test_a_statement_that_names_no_whole_roster_is_refused(plan: Plan, tmp_path: Path) -> None:
    run = NetworkedRun(plan, tmp_path / "run")
    run.signers.roster = ROSTER_TAG + length_prefixed(b"7", b"")
    run.signers.roster_hash = sha256(run.signers.roster).digest()
    run.begin()
    run.journal.close()
    _refused(tmp_path / "run", "the statement of epoch 0 does not hold: a roster that is not whole")


# Certificates


def test_a_certificate_about_another_state_is_refused(original: Original, run: Path) -> None:
    """The evidence against a server that told two stories: clients have signed what the journal does not hold."""
    record = original.epochs[0]
    _put_certificate(run, original.signers.certificate(record.run, 3, b"another story".ljust(32), range(CLIENTS)))
    with pytest.raises(ChainError, match="clients have signed another state before round 3") as refused:
        verify(run)
    assert refused.value.round_number == 3


def test_a_certificate_of_another_round_is_refused(original: Original, run: Path) -> None:
    late = original.certificates[1]
    _put_certificate(run, original.signers.certificate(late.run, 3, late.chain, range(CLIENTS)))
    _refused(run, "clients have signed another state before round 3")


def test_a_certificate_by_too_few_is_refused(original: Original, run: Path) -> None:
    sound = original.certificates[1]
    _put_certificate(run, original.signers.certificate(sound.run, sound.round, sound.chain, range(2)))
    _refused(run, "the certificate before round 5 does not hold: 2 clients have signed, expected at least 3")
    _put_certificate(run, original.signers.certificate(sound.run, sound.round, sound.chain, range(3)))
    assert verify(run).rounds == 5


def test_a_certificate_by_other_keys_is_refused(original: Original, run: Path) -> None:
    sound = original.certificates[1]
    _put_certificate(run, Signers(CLIENTS).certificate(sound.run, sound.round, sound.chain, range(CLIENTS)))
    _refused(run, "the certificate before round 5 does not hold: client 0 has not signed the state before round 5")


def test_a_certificate_of_another_run_is_refused(original: Original, run: Path) -> None:
    sound = original.certificates[1]
    other = original.signers.certificate(run_of(b"another"), sound.round, sound.chain, range(CLIENTS))
    _put_certificate(run, other)
    _refused(run, "the certificate before round 5 belongs to another run")


def test_a_certificate_about_rounds_that_are_missing_is_refused(original: Original, run: Path) -> None:
    sound = original.certificates[1]
    _put_certificate(run, original.signers.certificate(sound.run, 6, sound.chain, range(CLIENTS)))
    _refused(run, "a certificate about the state before round 6, which the journal has not got")
    _change(run, "DELETE FROM certificates WHERE round = 6")
    _change(run, "DELETE FROM rounds WHERE round = 4")
    _refused(run, "a certificate about the state before round 5, which the journal has not got")


@pytest.mark.parametrize("record", [b"", b"\xc1", b"\x91" * 10_000, "text", 7])
def test_what_is_no_certificate_is_refused(run: Path, record: object) -> None:
    _change(run, "UPDATE certificates SET record = ? WHERE round = 5", record)
    _refused(run, "a certificate cannot be read")


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
        _refused(tmp_path / "run", "clients have signed another state before round 1")
        _put_certificate(tmp_path / "run", sound)


# Anything at all


@pytest.mark.parametrize("table", ["epochs", "certificates"])
def test_any_changed_byte_of_what_was_signed_is_noticed(run: Path, table: str) -> None:
    columns = {"epochs": ("statement", "nonces", "signatures", "roster"), "certificates": ("record",)}[table]
    key_column, draw = {"epochs": "epoch", "certificates": "round"}[table], np.random.default_rng(0)
    for column in columns:
        db = sqlite3.connect(run / "journal.sqlite")
        ((key, data),) = db.execute(f"SELECT {key_column}, {column} FROM {table} ORDER BY 1 DESC LIMIT 1").fetchall()
        db.close()
        for _ in range(25):
            spoilt = bytearray(data)
            spoilt[draw.integers(len(data))] ^= 1 << int(draw.integers(8))
            _change(run, f"UPDATE {table} SET {column} = ? WHERE {key_column} = ?", bytes(spoilt), key)
            with pytest.raises(BaffleError):
                verify(run)
        _change(run, f"UPDATE {table} SET {column} = ? WHERE {key_column} = ?", data, key)
    assert verify(run).rounds == 5
