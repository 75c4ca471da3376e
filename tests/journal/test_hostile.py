"""Whatever a folder holds, an audit ends soon: with a `Verified` or with a `BaffleError`, never with anything else."""

import os
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from fuzzing.checks import within
from fuzzing.damage import damaged_file

from baffle.core.messages import Group, Outcome, encode
from baffle.core.state import apply
from baffle.errors import BaffleError, JournalError, PlanError
from baffle.journal.audit import Verified, verify
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.plan import Plan, change as change_plan, load, parse
from baffle.simulation import resume
from baffle.trajectory import trajectory_of
from tests.support.journals import Written, change, database, refused
from tests.support.statements import NetworkedRun

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # absurd rates overflow, which is no fault

JOURNALS = Path(__file__).resolve().parents[1] / "journals"
DAMAGES = 20
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
    *(None, 0, -1, 2**40, 2**63 - 1, 0.5, float("inf"), "", "12", b"", b"\xff\xfe", bytes(32), DEEP),
    *("[" * 100_000, "seed = 0x" + "f" * 10_000),
    b"\x91\xc6\xff\xff\xff\xff",  # a byte string that claims 4 GB
    b"\x94\xa7outcome\x00\xa7skipped\xdd\xff\xff\xff\xff",  # an array that claims four thousand million items
    encode(Outcome(0, "skipped", ())),
    encode(Outcome(0, "scalars", (Group(2**63 - 1, b"", 2**63 - 1),))),
    encode(Outcome(0, "vector", (Group(0, bytes(7), 0),) * 1000)),
]


def _audit(run: Path) -> Verified | None:
    """Verify the run, and none if it is refused in a few words; any other error fails the test."""
    try:
        with within(SECONDS):
            return verify(run)
    except BaffleError as fault:
        words = str(fault)
    assert len(words) < 2000
    return None


def _catch_up(run: Path) -> None:
    """Do what a resumed run and an export do before they trust a journal."""
    with within(SECONDS), suppress(BaffleError), Journal.open(run / "journal.sqlite") as journal, journal.one_view():
        catch_up(journal, lineage_of(journal, journal.plan()))
        list(journal.metrics())
        journal.participation.contributions(journal.plan().federation.clients)
        journal.participation.last_contributions(journal.plan().federation.clients)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(JOURNALS / "tiers", tmp_path / "tiers")


def _tell_everywhere(run: Path, text: str) -> None:
    """Change the plan as a careful forger does: in the file, in the journal, and in the journal's digest of it."""
    (run / "plan.toml").write_text(text)
    change(run, "UPDATE run SET plan = ?, trajectory_digest = ?", text, parse(text).trajectory_digest())


@pytest.fixture(scope="module")
def _networked(tiny: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = tiny("ring.n_max=20", "federation.clients=4", "secure.mode=malicious-server")
    return NetworkedRun(plan, tmp_path_factory.mktemp("networked") / "run").whole()


@pytest.fixture
def networked_run(_networked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_networked, tmp_path / "networked"))


@pytest.mark.parametrize(
    ("table", "column"), [(table, column) for table, columns in (COLUMNS | OF_NETWORKS).items() for column in columns]
)
def test_any_value_in_any_column(run: Path, networked_run: Path, table: str, column: str) -> None:
    run, key = networked_run if table in OF_NETWORKS else run, (COLUMNS | OF_NETWORKS)[table][0]
    rows = "" if table == "run" else f"WHERE {key} = (SELECT max({key}) FROM {table})"
    sound = (run / "journal.sqlite").read_bytes()
    expected = verify(run)
    for value in NASTY[:: 2 if table in OF_NETWORKS else 1]:  # audits with signatures take three times as long
        (run / "journal.sqlite").write_bytes(sound)
        with database(run) as db:
            try:
                db.execute(f"UPDATE OR REPLACE {table} SET {column} = ? {rows}", (value,))
            except sqlite3.IntegrityError:
                continue  # SQLite itself keeps this value out of the column
        assert _audit(run) in (None, expected), f"{value!r:.60}"
        _catch_up(run)


@pytest.mark.parametrize(
    "statement", [*(f"DELETE FROM {table}" for table in COLUMNS), "INSERT INTO run SELECT * FROM run"]
)
def test_missing_rows_and_a_second_run(run: Path, statement: str) -> None:
    change(run, statement)
    _audit(run)
    _catch_up(run)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT"
ROUND = "round INTEGER PRIMARY KEY"


@pytest.mark.parametrize(
    "script",
    [
        *(f"DROP TABLE {table}" for table in COLUMNS | OF_NETWORKS),
        *(f"ALTER TABLE {table} ADD COLUMN more TEXT" for table in ("run", "epochs")),
        *("ALTER TABLE rounds RENAME TO other", "ALTER TABLE rounds RENAME COLUMN chain TO other"),
        *(
            f"DROP TABLE {table}; CREATE VIEW {table} AS {ENDLESS} {', '.join(f'i AS {name}' for name in names)} FROM n"
            for table, names in COLUMNS.items()
        ),
        "CREATE TRIGGER surprise AFTER INSERT ON rounds BEGIN DELETE FROM snapshots; END",
        f"DROP TABLE snapshots; CREATE TABLE snapshots ({ROUND}, state BLOB AS (zeroblob(900000000)) VIRTUAL)",
    ],
)
def test_other_tables_than_those_of_a_journal_are_refused(networked_run: Path, script: str) -> None:
    """Views, triggers and computed columns could do anything."""
    with database(networked_run) as db:
        db.executescript(script)
    with within(SECONDS):
        refused(networked_run, "tables of a journal")


@pytest.mark.parametrize("table", OF_NETWORKS)
def test_a_simulation_has_no_tables_of_a_network(run: Path, table: str) -> None:
    change(run, f"CREATE TABLE {table} ({', '.join(OF_NETWORKS[table])})")
    refused(run, "tables of a journal")


def test_what_sqlite_says_about_a_table_may_be_no_text(run: Path) -> None:
    """It quotes the names of tables that it cannot read."""
    file = run / "journal.sqlite"
    data = file.read_bytes().replace(b"metricsmetrics", b"m\xe1tricsmetrics")
    file.write_bytes(data.replace(b"TABLE metrics (", b"TABLE metrics <"))
    with pytest.raises(UnicodeDecodeError), closing(sqlite3.connect(file)) as db:
        db.execute("SELECT * FROM sqlite_master")
    for read in (lambda: verify(run), lambda: Journal.begun(file), lambda: resume(run)):
        with pytest.raises(JournalError, match="cannot be read"):
            read()


def test_what_analyze_adds_does_no_harm(run: Path) -> None:
    expected = verify(run)
    with database(run) as db:
        db.execute("ANALYZE")
        assert db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > len(COLUMNS)
    assert verify(run) == expected


def test_rows_that_share_a_page_are_refused(run: Path) -> None:
    """A page that lists one page below it twenty times holds twenty times its rows; a few such levels never end."""
    with database(run) as db:
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
    with within(SECONDS):
        refused(run, "is damaged")


@pytest.mark.parametrize("number", [2**40, 2**63 - 1, -1, -(2**63)])
def test_a_number_of_weights_is_checked_before_anything_has_its_size(run: Path, number: int) -> None:
    change(run, "UPDATE run SET n_weights = ?", number)
    with within(SECONDS):
        refused(run, "weights")


def test_rounds_and_snapshots_before_the_first_are_refused(run: Path) -> None:
    change(run, "INSERT INTO rounds SELECT -1, outcome, chain FROM rounds WHERE round = 0")
    refused(run, "before round 0")
    with database(run) as db:
        db.execute("DELETE FROM rounds WHERE round < 0")
        db.execute("INSERT INTO snapshots SELECT -9, state FROM snapshots WHERE round = 0")
    refused(run, "snapshot -9")


HOSTILE_SETTINGS = [
    *("ring.n_max=0", f"ring.n_max={2**63 - 1}", "ring.d_max=5e-324", "ring.d_max=3e38", f"run.workers={2**63 - 1}"),
    *("probe.k=1000000", "federation.clients=1000000", "federation.participation=1e-300", f"rounds={2**63 - 1}"),
    *("update.rate=3e38", "update.betas=[0.9999999999, 0.9999999999]", "update.weight_decay=3e38"),
    *("federation.tiers=[{k=1,share=5e-324}]", 'secure.mode="malicious-server"', "secure.threshold=4"),
    *("secure.groups=2", 'estimator="backprop"', 'federation.level="epoch"', 'federation.seeds="own"'),
    *('probe.distribution="sphere"', 'task.data="no_such_module:boom"', 'task.model={name="onnx"}'),
    *('task.model={name="custom",factory="no_such_module:boom"}', 'run.model="/dev/zero"', 'run.device="cuda:99"'),
]


@pytest.mark.parametrize("setting", HOSTILE_SETTINGS)
def test_a_plan_with_absurd_numbers(run: Path, setting: str) -> None:
    plan = load(str(run / "plan.toml"))
    federation = ["federation.tiers=[]"] if not setting.startswith("federation.tiers") else []
    try:
        text = change_plan(plan, [*federation, setting]).to_toml()
    except PlanError:
        text = change_plan(plan, [*federation, setting, 'secure.mode="off"', "run.model=''"]).to_toml()
    _tell_everywhere(run, text)
    _audit(run)
    _catch_up(run)


@pytest.mark.parametrize(
    "text",
    [
        *("a = " + "[" * 100_000, "a = " + "{a=" * 5_000, "seed = 0x" + "f" * 10_000, "rounds = = 1"),
        *(f"run.workers = {2**63}", f"probe.micro_batch = {2**200}"),
        *("[probe]\nlayout = " + "[" * 300 + "]" * 300, ".".join("a" * 50_000) + " = 1"),
        *('"' + "k" * 100_000 + '" = 1', 'name = "' + "k" * 100_000 + '"\nseed = "' + "k" * 100_000 + '"'),
        *("task.model.name = [1]", "task.model = {name = {a = 1}}", "task.model = 3", "task = [[1]]"),
        *("probe = [{k = 1}]", "federation.tiers = [3]", "rounds = 1979-05-27", "update.rate = nan"),
        "secure.threshold = 3\nfederation.clients = 50000",
        'secure = {threshold = 3, mode = "malicious-server"}\nfederation.clients = 50000',
    ],
)
def test_a_plan_that_cannot_be_right(run: Path, text: str) -> None:
    with within(SECONDS), pytest.raises(PlanError) as refused:
        parse(text)
    assert len(str(refused.value)) < 1000
    (run / "plan.toml").write_text(text)
    assert _audit(run) is None
    shutil.copy(JOURNALS / "tiers" / "plan.toml", run)
    change(run, "UPDATE run SET plan = ?", text)
    assert _audit(run) is None


UNITS = ("federation.tiers=[]", 'probe.supports="units"')
LAYERS = ('update.moments="layers"',)


@pytest.mark.parametrize(
    ("settings", "key", "row"),
    [
        *((UNITS, "layout", (0, 2**62, 0, 0, 12)), (UNITS, "layout", (0, 1, 2**62, 2**63 - 1, 12))),
        *((UNITS, "layout", (900, 901, 0, 900, 12)), (UNITS, "layout", (0, 500, 100, 400, 12))),
        *(
            (UNITS, "layout", (5, 5, 0, 0, 12)),
            (UNITS, "layout", (0, 2, 1, 0, 12)),
            (UNITS, "layout", (0, 1, 906, 907, 12)),
        ),
        *((LAYERS, "layers", (0, 2**62, 0, 0)), (LAYERS, "layers", (0, 1, 2**62, 2**63 - 1))),
        *((LAYERS, "layers", (5, 5, 0, 0)), (LAYERS, "layers", (0, 906, 0, 0))),
    ],
)
def test_a_layout_with_absurd_numbers(run: Path, settings: tuple[str, ...], key: str, row: tuple[int, ...]) -> None:
    text = change_plan(load(str(run / "plan.toml")), settings).to_toml()
    text = text.replace(f"{key} = []", f"{key} = [{list(row)}]")
    (run / "plan.toml").write_text(text)
    with suppress(PlanError):
        _tell_everywhere(run, text)
        assert _audit(run) is None


NAMES = ["plan.toml", "summary.json", "journal.sqlite"]
SIDECARS = ["journal.sqlite-wal", "journal.sqlite-shm", "journal.sqlite-journal"]


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no space on the disk


PLACES: dict[str, Callable[[Path], object]] = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "long link": lambda path: path.symlink_to("x" * 4000),
    "huge": _huge,
}


@pytest.mark.parametrize("name", NAMES + SIDECARS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_file_that_is_something_else(run: Path, name: str, place: Callable[[Path], object]) -> None:
    (run / name).unlink(missing_ok=True)
    try:
        place(run / name)
    except OSError:
        pytest.skip("this disk cannot hold such a file")
    _audit(run)
    _catch_up(run)


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
        "ring.n_max=20", 'task.data="hostile_module:data"', 'task.model={name="custom",factory="hostile_module:model"}'
    )
    run = Written.begin(tmp_path / "run", plan)
    run.skip()
    run.journal.close()
    assert verify(run.folder).rounds == 1
    assert "hostile_module" not in sys.modules


@pytest.mark.parametrize(
    ("name", "file"), [*(("tiers", file) for file in NAMES), ("units", "journal.sqlite"), ("epoch", "journal.sqlite")]
)
def test_random_damage(tmp_path: Path, name: str, file: str) -> None:
    run = shutil.copytree(JOURNALS / name, tmp_path / name)
    expected = verify(run)
    sound = (run / file).read_bytes()
    dice = random.Random(f"{name} {file}")
    refusals = 0
    for _ in range(DAMAGES):
        (run / file).write_bytes(damaged_file(sound, dice))
        verified = _audit(run)
        assert verified in (None, expected)
        refusals += verified is None
        _catch_up(run)
    assert refusals > DAMAGES // 10


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        *(("UPDATE metrics SET record = ?", value) for value in ("[" * 100_000, "[1]", b"\xff", "{}")),
        *(("UPDATE participation SET client = ? WHERE client = 0", value) for value in ("nobody", 2**60)),
        *(("UPDATE run SET n_weights = ?", 2**40), ("UPDATE run SET versions = ?", b"\xff")),
        *(
            (f"UPDATE {column} = ?", value)
            for column in ("snapshots SET state", "rounds SET outcome")
            for value in ("text", DEEP)
        ),
        *(("UPDATE rounds SET chain = ?", "text"), ("DELETE FROM run WHERE ? IS NULL", None)),
    ],
)
def test_resuming_a_forged_run(finished_run: Path, statement: str, value: object) -> None:
    change(finished_run, statement, value)
    with within(SECONDS), suppress(BaffleError):
        resume(finished_run, ["rounds=8"])
