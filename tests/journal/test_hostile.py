"""Whatever a folder holds, an audit ends soon: with a `Verified` or with a `BaffleError`, never with anything else."""

import os
import random
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from baffle.core.messages import Group, Outcome, encode
from baffle.core.state import apply
from baffle.errors import BaffleError, ChainError, JournalError, PlanError
from baffle.journal.audit import Verified, verify
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.lineage import Lineage
from baffle.plan import Plan, change, load, parse
from baffle.simulation import resume
from baffle.trajectory import trajectory_of
from tests.support.statements import NetworkedRun

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # absurd rates overflow, which is no fault

JOURNALS = Path(__file__).resolve().parents[1] / "journals"
DAMAGES = 40
"""How often each file is damaged at random."""

SECONDS = 60.0
"""No audit here takes longer, even on a busy machine. A sound run takes about 0.02 s."""

COLUMNS = {
    "run": ("format", "plan", "trajectory_digest", "n_weights", "versions"),
    "rounds": ("round", "outcome", "chain"),
    "metrics": ("round", "record"),
    "snapshots": ("round", "state"),
    "participation": ("round", "client", "event"),
}
OF_NETWORKS = {
    "epochs": ("epoch", "statement", "nonces", "signatures", "roster"),
    "certificates": ("round", "run", "record"),
}
"""The tables that only the journal of a networked run has."""

DEEP = b"\x91" * 100_000
NASTY: list[object] = [
    None,
    0,
    1,
    -1,
    2**31,
    2**40,
    2**63 - 1,
    -(2**63),
    0.5,
    1e300,
    float("inf"),
    "",
    "0",
    "12",
    "\x00",
    "[" * 100_000,
    '{"a":' * 50_000,
    "seed = 0x" + "f" * 10_000,
    "seed = " + "9" * 10_000,
    b"",
    b"12",
    b"\xff\xfe",
    bytes(32),
    DEEP,
    b"\xdd\xff\xff\xff\xff",  # an array that claims four thousand million items
    b"\x91\xc6\xff\xff\xff\xff",  # a byte string that claims 4 GB
    b"\x94\xa7outcome\x00\xa7skipped\xdd\xff\xff\xff\xff",
    b"\x94\xa7outcome\x00\xa7skipped\x90",
    encode(Outcome(0, "skipped", ())),
    encode(Outcome(0, "scalars", (Group(2**63 - 1, b"", 2**63 - 1),))),
    encode(Outcome(0, "vector", (Group(0, bytes(7), 0),) * 1000)),
]


class TooSlowError(Exception):
    """An audit took longer than `SECONDS`. Not a BaffleError, so that no test takes it for a refusal."""


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _audit(run: Path) -> Verified | None:
    """Verify the run, and none if it is refused in a few words; any other error fails the test."""
    try:
        with _time_limit():
            return verify(run)
    except BaffleError as fault:
        words = str(fault)
    assert len(words) < 2000
    return None


def _catch_up(run: Path) -> None:
    """Do what a resumed run and an export do before they trust a journal."""
    with _time_limit(), suppress(BaffleError), Journal.open(run / "journal.sqlite") as journal, journal.one_view():
        catch_up(journal, lineage_of(journal, journal.plan()))
        list(journal.metrics())
        journal.participation.contributions(journal.plan().federation.clients)
        journal.participation.last_contributions(journal.plan().federation.clients)


def _database(run: Path) -> "closing[sqlite3.Connection]":
    db = sqlite3.connect(run / "journal.sqlite", isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")  # hundreds of changes need not survive a power cut
    return closing(db)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return _copy("tiers", tmp_path)


def _copy(name: str, folder: Path) -> Path:
    return shutil.copytree(JOURNALS / name, folder / name)


def _tell_everywhere(run: Path, text: str) -> None:
    """Change the plan as a careful forger does: in the file, in the journal, and in the journal's digest of it."""
    (run / "plan.toml").write_text(text)
    with _database(run) as db:
        db.execute("UPDATE run SET plan = ?, trajectory_digest = ?", (text, parse(text).trajectory_digest()))


@pytest.mark.parametrize(("table", "column"), [(table, column) for table in COLUMNS for column in COLUMNS[table]])
def test_any_value_in_any_column(run: Path, table: str, column: str) -> None:
    _try_any_value(run, table, column, "" if table == "run" else f"WHERE round = (SELECT max(round) FROM {table})")


@pytest.fixture(scope="module")
def _networked(tiny: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = tiny("ring.n_max=20", "federation.clients=4", "secure.mode=malicious-server")
    return NetworkedRun(plan, tmp_path_factory.mktemp("networked") / "run").whole()


@pytest.fixture
def networked_run(_networked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_networked, tmp_path / "networked"))


@pytest.mark.parametrize(
    ("table", "column"), [(table, column) for table in OF_NETWORKS for column in OF_NETWORKS[table]]
)
def test_any_value_in_any_column_of_a_networked_run(networked_run: Path, table: str, column: str) -> None:
    first = OF_NETWORKS[table][0]
    _try_any_value(networked_run, table, column, f"WHERE {first} = (SELECT max({first}) FROM {table})")


@pytest.mark.parametrize("table", [*COLUMNS, *OF_NETWORKS])
@pytest.mark.parametrize("statement", ["DROP TABLE {table}", "ALTER TABLE {table} ADD COLUMN more TEXT"])
def test_a_networked_run_has_its_own_tables_and_no_others(networked_run: Path, table: str, statement: str) -> None:
    with _database(networked_run) as db:
        db.execute(statement.format(table=table))
    with pytest.raises(JournalError, match="tables of a journal"):
        verify(networked_run)


@pytest.mark.parametrize("table", OF_NETWORKS)
def test_a_simulation_has_no_tables_of_a_network(run: Path, table: str) -> None:
    with _database(run) as db:
        db.execute(f"CREATE TABLE {table} ({', '.join(OF_NETWORKS[table])})")
    with pytest.raises(JournalError, match="tables of a journal"):
        verify(run)


def _try_any_value(run: Path, table: str, column: str, rows: str) -> None:
    sound = (run / "journal.sqlite").read_bytes()
    expected = verify(run)
    for value in NASTY:
        (run / "journal.sqlite").write_bytes(sound)
        with _database(run) as db:
            try:
                db.execute(f"UPDATE OR REPLACE {table} SET {column} = ? {rows}", (value,))
            except sqlite3.IntegrityError:
                continue  # SQLite itself keeps this value out of the column
        assert _audit(run) in (None, expected), f"{value!r:.60}"
        _catch_up(run)


@pytest.mark.parametrize("table", COLUMNS)
@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE {table}",
        "DELETE FROM {table}",
        "ALTER TABLE {table} RENAME TO other",
        "ALTER TABLE {table} ADD COLUMN more TEXT",
        "ALTER TABLE {table} RENAME COLUMN {column} TO other",
        "INSERT OR IGNORE INTO {table} SELECT * FROM {table}",
    ],
)
def test_missing_and_changed_tables(run: Path, table: str, statement: str) -> None:
    with _database(run) as db:
        db.execute(statement.format(table=table, column=COLUMNS[table][0]))
    _audit(run)
    _catch_up(run)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT"


@pytest.mark.parametrize("table", COLUMNS)
def test_a_view_in_place_of_a_table_is_refused(run: Path, table: str) -> None:
    values = ", ".join(f"i AS {column}" for column in COLUMNS[table])
    with _database(run) as db:
        db.execute(f"DROP TABLE {table}")
        db.execute(f"CREATE VIEW {table} AS {ENDLESS} {values} FROM n")
    with pytest.raises(JournalError, match="tables of a journal"), _time_limit():
        verify(run)


def test_a_trigger_is_refused(run: Path) -> None:
    with _database(run) as db:
        db.execute("CREATE TRIGGER surprise AFTER INSERT ON rounds BEGIN DELETE FROM snapshots; END")
    with pytest.raises(JournalError, match="surprise"):
        verify(run)


def test_a_computed_column_is_refused(run: Path) -> None:
    with _database(run) as db:
        db.execute("DROP TABLE snapshots")
        db.execute(
            "CREATE TABLE snapshots (round INTEGER PRIMARY KEY, "
            "state BLOB NOT NULL GENERATED ALWAYS AS (zeroblob(900000000)) VIRTUAL)"
        )
    with pytest.raises(JournalError, match="tables of a journal"):
        verify(run)


def test_what_sqlite_says_about_a_table_may_be_no_text(run: Path) -> None:
    """It quotes the names of tables that it cannot read."""
    file = run / "journal.sqlite"
    data = (
        file.read_bytes()
        .replace(b"metricsmetrics", b"m\xe1tricsmetrics")
        .replace(b"TABLE metrics (", b"TABLE metrics <")
    )
    file.write_bytes(data)
    with pytest.raises(UnicodeDecodeError), closing(sqlite3.connect(file)) as db:
        db.execute("SELECT * FROM sqlite_master")
    for read in (lambda: verify(run), lambda: Journal.begun(file), lambda: resume(run)):
        with pytest.raises(JournalError, match="cannot be read"):
            read()


def test_what_analyze_adds_does_no_harm(run: Path) -> None:
    expected = verify(run)
    with _database(run) as db:
        db.execute("ANALYZE")
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > len(COLUMNS)
    assert verify(run) == expected


def test_rows_that_share_a_page_are_refused(run: Path) -> None:
    """A page that lists one page below it twenty times holds twenty times its rows; a few such levels never end."""
    with _database(run) as db:
        db.execute("WITH RECURSIVE n(i) AS (SELECT 10 UNION ALL SELECT i + 1 FROM n WHERE i < 4000) "
                   "INSERT INTO metrics SELECT i, hex(zeroblob(200)) FROM n")  # fmt: skip
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'metrics'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    file = run / "journal.sqlite"
    data = bytearray(file.read_bytes())
    start = (root - 1) * size
    assert data[start] == 5, "expected an inner page of a table"
    cells = int.from_bytes(data[start + 3 : start + 5], "big")
    places = [start + int.from_bytes(data[at : at + 2], "big") for at in range(start + 12, start + 12 + 2 * cells, 2)]
    for place in places:
        data[place : place + 4] = data[places[0] : places[0] + 4]
    file.write_bytes(data)
    with pytest.raises(JournalError, match="is damaged"), _time_limit():
        verify(run)


@pytest.mark.parametrize("number", [2**40, 2**63 - 1, -1, -(2**63)])
def test_a_number_of_weights_is_checked_before_anything_has_its_size(run: Path, number: int) -> None:
    with _database(run) as db:
        db.execute("UPDATE run SET n_weights = ?", (number,))
    with pytest.raises(JournalError, match="weights"), _time_limit():
        verify(run)


def test_rounds_and_snapshots_before_the_first_are_refused(run: Path) -> None:
    with _database(run) as db:
        db.execute("INSERT INTO rounds SELECT -1, outcome, chain FROM rounds WHERE round = 0")
    with pytest.raises(ChainError, match="before round 0"):
        verify(run)
    with _database(run) as db:
        db.execute("DELETE FROM rounds WHERE round < 0")
        db.execute("INSERT INTO snapshots SELECT -9, state FROM snapshots WHERE round = 0")
    with pytest.raises(JournalError, match="snapshot -9"):
        verify(run)


HOSTILE_SETTINGS = [
    "ring.n_max=0",
    f"ring.n_max={2**63 - 1}",
    "ring.d_max=5e-324",
    "ring.d_max=1e308",
    f"run.workers={2**63 - 1}",
    "probe.k=1000000",
    "federation.clients=1000000",
    "federation.participation=1e-300",
    f"rounds={2**63 - 1}",
    "update.rate=1e308",
    "update.rate=5e-324",
    "update.betas=[0.9999999999, 0.9999999999]",
    "update.clip=1e308",
    "update.weight_decay=1e308",
    "federation.tiers=[{k=1,share=5e-324}]",
    'secure.mode="malicious-server"',
    "secure.threshold=4",
    "secure.groups=2",
    'estimator="backprop"',
    'federation.level="epoch"',
    'federation.seeds="own"',
    'probe.distribution="sphere"',
    'task.data="no_such_module:boom"',
    'task.model={name="custom",factory="no_such_module:boom"}',
    'task.model={name="onnx"}',
    'run.model="/dev/zero"',
    'run.device="cuda:99"',
]


@pytest.mark.parametrize("setting", HOSTILE_SETTINGS)
def test_a_plan_with_absurd_numbers(run: Path, setting: str) -> None:
    plan = load(str(run / "plan.toml"))
    federation = ["federation.tiers=[]"] if not setting.startswith("federation.tiers") else []
    try:
        text = change(plan, [*federation, setting]).to_toml()
    except PlanError:
        text = change(plan, [*federation, setting, 'secure.mode="off"', "run.model=''"]).to_toml()
    _tell_everywhere(run, text)
    _audit(run)
    _catch_up(run)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "{a=" * 5_000,
        "seed = " + "9" * 10_000,
        "seed = 0x" + "f" * 10_000,
        "name = 0x" + "f" * 10_000,
        f"run.workers = {2**63}",
        f"probe.micro_batch = {2**200}",
        "[probe]\nlayout = " + "[" * 300 + "]" * 300,
        ".".join("a" * 200_000) + " = 1",
        '"' + "k" * 1_000_000 + '" = 1',
        'name = "' + "k" * 1_000_000 + '"\nseed = "' + "k" * 1_000_000 + '"',
        "task.model.name = [1]",
        "task.model = {name = {a = 1}}",
        "task.model = 3",
        "task = [[1]]",
        "probe = [{k = 1}]",
        "federation.tiers = [{k = 0, share = 0.5}]",
        "federation.tiers = [3]",
        "rounds = 1979-05-27",
        "update.rate = nan",
        "update.rate = inf",
        "federation.participation = nan",
        "secure.threshold = 3\nfederation.clients = 200000",
        'secure = {threshold = 3, mode = "malicious-server"}\nfederation.clients = 200000',
    ],
)
def test_a_plan_that_cannot_be_right(run: Path, text: str) -> None:
    with _time_limit(), pytest.raises(PlanError) as refused:
        parse(text)
    assert len(str(refused.value)) < 1000
    (run / "plan.toml").write_text(text)
    assert _audit(run) is None
    shutil.copy(JOURNALS / "tiers" / "plan.toml", run)
    with _database(run) as db:
        db.execute("UPDATE run SET plan = ?", (text,))
    assert _audit(run) is None


@pytest.mark.parametrize(
    "row",
    [
        (0, 2**62, 0, 0, 12),
        (0, 1, 2**62, 2**63 - 1, 12),
        (900, 901, 0, 900, 12),
        (0, 500, 100, 400, 12),
        (5, 5, 0, 0, 12),
        (0, 2, 1, 0, 12),
        (0, 1, 906, 907, 12),
    ],
)
def test_a_layout_with_absurd_numbers(run: Path, row: tuple[int, ...]) -> None:
    text = change(load(str(run / "plan.toml")), ["federation.tiers=[]", 'probe.supports="units"']).to_toml()
    text = text.replace("layout = []", f"layout = [{list(row)}]")
    (run / "plan.toml").write_text(text)
    try:
        _tell_everywhere(run, text)
    except PlanError:
        return
    assert _audit(run) is None


@pytest.mark.parametrize("row", [(0, 2**62, 0, 0), (0, 1, 2**62, 2**63 - 1), (5, 5, 0, 0), (0, 906, 0, 0)])
def test_layers_with_absurd_numbers(run: Path, row: tuple[int, ...]) -> None:
    text = change(load(str(run / "plan.toml")), ['update.moments="layers"']).to_toml()
    text = text.replace("layers = []", f"layers = [{list(row)}]")
    (run / "plan.toml").write_text(text)
    try:
        _tell_everywhere(run, text)
    except PlanError:
        return
    assert _audit(run) is None


def test_a_tail_in_front_of_its_slice_is_refused(tiny: Callable[..., Plan]) -> None:
    """A gradient is rebuilt piece by piece, which counts on a tail that lies behind."""
    with pytest.raises(PlanError, match="tail"):
        tiny('probe.supports="units"', "probe.layout=[[200_000, 300_000, 0, 100_000, 4]]")


CLAIM = '{"rounds": 4, "weights_sha256": "x"'


@pytest.mark.parametrize(
    "content",
    [
        CLAIM[:-3] + "NaN}",
        CLAIM + ', "a": ' + "[" * 100_000,
        CLAIM + ', "a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        CLAIM.replace("4", "9" * 10_000) + "}",
        CLAIM.replace("4", "-1") + "}",
        CLAIM.replace("4", "4.5") + "}",
        CLAIM.replace("4", "1e400") + "}",
        CLAIM.replace("4", "null") + "}",
        CLAIM.replace('"x"', "3") + "}",
        CLAIM.replace("x", "x" * 100_000) + "}",
        CLAIM.replace("x", "\\ud800") + "}",
        CLAIM + "}",
        " " * (2 << 20),
    ],
)
def test_a_summary_that_cannot_be_right(run: Path, content: str) -> None:
    (run / "summary.json").write_text(content)
    assert _audit(run) is None


NAMES = ["plan.toml", "summary.json", "journal.sqlite"]
SIDECARS = ["journal.sqlite-wal", "journal.sqlite-shm", "journal.sqlite-journal"]


def _directory(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _long_link(path: Path) -> None:
    path.symlink_to("x" * 4000)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no space on the disk


@pytest.mark.parametrize("name", NAMES + SIDECARS)
@pytest.mark.parametrize("place", [_directory, _pipe, _loop, _device, _long_link, _huge])
def test_a_file_that_is_something_else(run: Path, name: str, place: Callable[[Path], None]) -> None:
    (run / name).unlink(missing_ok=True)
    try:
        place(run / name)
    except OSError:
        pytest.skip("this disk cannot hold such a file")
    _audit(run)
    _catch_up(run)


def test_a_run_of_many_directions_and_few_totals(run: Path) -> None:
    text = change(load(str(run / "plan.toml")), ["probe.k=1000000", "federation.tiers=[]"]).to_toml()
    _tell_everywhere(run, text)
    with pytest.raises(ChainError, match="expected 4000000 bytes"), _time_limit():
        verify(run)


@pytest.mark.parametrize("directions", [[], ["probe.distribution=outer", "probe.shapes=[[2, 2], [1]]"]])
def test_a_journal_asks_for_no_thread_for_every_block(
    tiny: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, directions: list[str]
) -> None:
    threads: list[int] = []

    def useful(wanted: int, _blocks: int) -> int:
        threads.append(wanted)
        return 1

    monkeypatch.setattr("baffle.core.rebuild._useful", useful)
    trajectory = trajectory_of(tiny("ring.n_max=20", f"run.workers={10**9}", *directions), 5)
    group = Group(0, bytes(4 * trajectory.length), 3)
    apply(trajectory.rule, trajectory.rule.start(np.ones(5, np.float32)), Outcome(0, "scalars", (group,)))
    assert threads
    assert max(threads) <= 1000


def test_an_audit_runs_nothing_that_a_plan_names(
    tiny: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    plan = tiny(
        "ring.n_max=20",
        'task.data="hostile_module:data"',
        'task.model={name="custom",factory="hostile_module:model"}',
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.toml").write_text(plan.to_toml())
    trajectory = trajectory_of(plan, 5)
    start = Lineage(trajectory).beginning(trajectory.rule.start(np.ones(5, np.float32)))
    with Journal.create(run / "journal.sqlite", plan, start.state, {}) as journal:
        journal.append(start.chain, Outcome(0, "skipped", ()), start.state)
    assert verify(run).rounds == 1
    assert "hostile_module" not in sys.modules


@pytest.mark.parametrize("name", ["tiers", "groups-own-median", "units", "epoch"])
@pytest.mark.parametrize("file", NAMES)
def test_random_damage(tmp_path: Path, name: str, file: str) -> None:
    run = _copy(name, tmp_path)
    expected = verify(run)
    sound = (run / file).read_bytes()
    dice = random.Random(f"{name} {file}")
    refusals = 0
    for _ in range(DAMAGES):
        (run / file).write_bytes(_damaged(sound, dice))
        verified = _audit(run)
        assert verified in (None, expected)
        refusals += verified is None
        _catch_up(run)
    assert refusals > DAMAGES // 10


def _damaged(data: bytes, dice: random.Random) -> bytes:
    """The data with bytes changed, a piece cut out, repeated or overwritten, or the end missing."""
    changed = bytearray(data)
    start = dice.randrange(len(data))
    stop = start + dice.choice((1, 4, 30, 1000))
    match dice.randrange(6):
        case 0:
            for _ in range(dice.choice((1, 2, 16))):
                changed[dice.randrange(len(data))] = dice.choice((0, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        case 1:
            del changed[start:stop]
        case 2:
            changed[start:start] = changed[start:stop]
        case 3:
            changed[start:stop] = bytes(stop - start)
        case 4:
            changed[start:stop] = dice.randbytes(stop - start)
        case _:
            del changed[start:]
    return bytes(changed)


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("UPDATE metrics SET record = ?", "[" * 100_000),
        ("UPDATE metrics SET record = ?", "[1]"),
        ("UPDATE metrics SET record = ?", b"\xff"),
        ("UPDATE metrics SET record = ?", "{}"),
        ("UPDATE participation SET client = ? WHERE client = 0", "nobody"),
        ("UPDATE participation SET client = ? WHERE client = 0", 2**60),
        ("UPDATE run SET n_weights = ?", 2**40),
        ("UPDATE run SET versions = ?", b"\xff"),
        ("UPDATE snapshots SET state = ?", "text"),
        ("UPDATE snapshots SET state = ?", DEEP),
        ("UPDATE rounds SET chain = ?", "text"),
        ("UPDATE rounds SET outcome = ?", DEEP),
        ("DELETE FROM run WHERE ? IS NULL", None),
    ],
)
def test_resuming_a_forged_run(finished_run: Path, statement: str, value: object) -> None:
    with _database(finished_run) as db:
        db.execute(statement, (value,))
    with _time_limit(), suppress(BaffleError):
        resume(finished_run, ["rounds=8"])
