"""Folders of runs that come from a stranger: whatever is planted in one, a command that writes there changes no other
file, calls nothing that the folder names, and believes no size."""

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import baffle
from baffle import files
from baffle.cli.log import Log
from baffle.core.messages import Group, Outcome, encode
from baffle.errors import BaffleError, PlanError
from baffle.plan import Plan, change, load
from baffle.report.live import LiveRun
from baffle.report.page import drawing_script, script_name
from tests.support.command_line import Cli, refused
from tests.support.journals import change as change_journal
from tests.support.memory import at_most
from tests.support.statements import NetworkedRun

CALLS = """
from pathlib import Path

Path(__file__).with_name("called").touch()

def model(*_, **__):
    raise AssertionError

data = loss = metric = model
"""
NAMING = {  # settings by which a plan names functions, and their names
    'task.data="theirs:data"': "theirs:data",
    'task.model={name="custom", factory="theirs:model"}': "theirs:model",
    'task.loss="theirs:loss"': "theirs:loss",
    'task.metrics=["accuracy", "theirs:metric"]': "theirs:metric",
}
JOURNAL = "journal.sqlite"
SIDECARS = ["journal.sqlite-wal", "journal.sqlite-shm", "journal.sqlite-journal"]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that appears if the module `theirs` in the current folder is imported."""
    (tmp_path / "theirs.py").write_text(CALLS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "called"
    sys.modules.pop("theirs", None)


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """A file of the user that no run may change."""
    path = tmp_path / "thesis.tex"
    path.write_text("precious")
    return path


def resume(cli: Cli, run: Path, *options: str) -> None:
    assert cli("run", "--resume", run, "--set", "rounds=8", *options).returncode == 0


def report(cli: Cli, run: Path) -> None:
    assert cli("report", run).returncode == 0


WRITTEN = ["plan.toml", "summary.json", "metrics.jsonl", "report.html", script_name()]


@pytest.mark.parametrize(
    ("write", "name"),
    [(report, name) for name in WRITTEN[2:]] + [(resume, name) for name in WRITTEN[1:]],  # the rest is read before
)
def test_no_file_is_written_through_a_link_in_its_place(
    cli: Cli, finished_run: Path, thesis: Path, write: Callable[[Cli, Path], None], name: str
) -> None:
    """N13. A link takes the place of a file that a run or a report writes."""
    (finished_run / name).unlink(missing_ok=True)
    (finished_run / name).symlink_to(thesis)
    write(cli, finished_run)
    assert thesis.read_text() == "precious"


@pytest.mark.parametrize("write", [report, resume])
def test_no_temporary_file_is_written_through_a_link(
    cli: Cli, finished_run: Path, thesis: Path, write: Callable[[Cli, Path], None]
) -> None:
    """N13. Version 0.2 wrote every file under a name that anybody could foresee."""
    for name in WRITTEN:
        (finished_run / f".{name}.new").symlink_to(thesis)
    (finished_run / f".{JOURNAL}.room").symlink_to(thesis)
    write(cli, finished_run)
    assert thesis.read_text() == "precious"


def test_a_temporary_file_has_a_random_name_and_is_new(
    finished_run: Path, thesis: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N13. Even if its name was guessed, nothing that is there already is opened."""
    names, renamed = set[str](), os.replace

    def noted(name: str, *arguments: Any, **folders: Any) -> None:
        names.add(name)
        renamed(name, *arguments, **folders)

    monkeypatch.setattr(os, "replace", noted)
    for _ in range(20):
        files.replace(finished_run / "summary.json", b"{}")
    assert len(names) == 20
    monkeypatch.setattr(files, "token_hex", lambda _: "0" * 16)
    (finished_run / f".baffle-{'0' * 16}.new").symlink_to(thesis)
    with pytest.raises(FileExistsError):
        files.replace(finished_run / "summary.json", b"{}")
    assert thesis.read_text() == "precious"


@pytest.mark.parametrize("name", [JOURNAL, *SIDECARS])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_journal_is_not_written_through_links(
    cli: Cli, finished_run: Path, thesis: Path, tmp_path: Path, name: str, link: Callable[[Path, Path], None]
) -> None:
    """N13. SQLite follows links, and makes what its own files are not into its own files."""
    target = shutil.copy(finished_run / JOURNAL, tmp_path / "other.sqlite") if name == JOURNAL else thesis
    before = Path(target).read_bytes()
    (finished_run / name).unlink(missing_ok=True)
    link(finished_run / name, Path(target))
    refused(cli("run", "--resume", finished_run, "--set", "rounds=8"), f"{name} is a link")
    assert Path(target).read_bytes() == before


@pytest.mark.parametrize("name", [JOURNAL, *SIDECARS])
@pytest.mark.parametrize("command", [["run", "--resume"], ["report"], ["verify"], ["status"]])
def test_no_file_is_made_through_a_link_to_nothing(
    cli: Cli, finished_run: Path, tmp_path: Path, name: str, command: list[str]
) -> None:
    """N13. Even a command that only reads a journal lets SQLite make its other files."""
    (finished_run / name).unlink(missing_ok=True)
    (finished_run / name).symlink_to(tmp_path / "made")
    refused(cli(*command, finished_run), f"{name} is a link")
    assert not (tmp_path / "made").exists()


def test_a_strangers_script_beside_a_report_is_replaced(cli: Cli, finished_run: Path, tmp_path: Path) -> None:
    """N14. The script that a report names is the one of this machine's plotly, also if the folder came with one of the
    same size, and also if a planted page leads elsewhere."""
    script, elsewhere = drawing_script().read_bytes(), tmp_path / "runs" / "some"
    elsewhere.mkdir(parents=True)
    (finished_run / script_name()).write_bytes(b"/" * len(script))
    (finished_run / "report.html").symlink_to(elsewhere / "report.html")
    report(cli, finished_run)
    assert (finished_run / script_name()).read_bytes() == script
    assert f'src="{script_name()}"' in (finished_run / "report.html").read_text()
    assert [*elsewhere.parent.rglob("*")] == [elsewhere]


MAGIC = bytes.fromhex("d9d505f920a163d7")


def rollback_journal(database: bytes, named: Path) -> bytes:
    """A journal that SQLite undoes by writing the first page anew. It belongs, it says, to a change of several
    databases whose list is the named file, which SQLite deletes when the last of them is undone."""
    size, name = int.from_bytes(database[16:18], "big"), bytes(named)
    page, nonce = database[:size], 1
    checksum = nonce + sum(page[place] for place in range(size - 200, 0, -200))
    head = MAGIC + struct.pack(">5I", 1, nonce, len(database) // size, 512, size)
    record = struct.pack(">I", 1) + page + struct.pack(">I", checksum)
    tail = struct.pack(">I", 2**30 // size + 1) + name + struct.pack(">2I", len(name), sum(name)) + MAGIC
    return head.ljust(512, b"\0") + record + tail


def test_no_file_is_deleted_that_a_rollback_journal_names(cli: Cli, finished_run: Path, thesis: Path) -> None:
    """N13. To undo a change, SQLite deletes the list of the databases that it was about, whatever that file is."""
    (finished_run / SIDECARS[2]).write_bytes(rollback_journal((finished_run / JOURNAL).read_bytes(), thesis))
    refused(cli("run", "--resume", finished_run), f"{SIDECARS[2]} names another file")
    assert thesis.read_text() == "precious"


def test_a_baseline_is_not_trained_in_a_linked_folder(cli: Cli, finished_run: Path, tmp_path: Path) -> None:
    """N13."""
    pytest.importorskip("torch")
    (tmp_path / "mine").mkdir()
    (finished_run / "baseline").symlink_to(tmp_path / "mine")
    done = cli("run", "--resume", finished_run, "--baseline", "--quiet")
    refused(done, "baseline is a link")
    assert not list((tmp_path / "mine").iterdir())


def test_a_servers_log_is_not_written_through_a_link(
    tmp_path: Path, thesis: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """N13. A folder that holds nothing but a log counts as empty, so a server writes there."""
    (tmp_path / "serve.log").symlink_to(thesis)
    Log("text", "server", tmp_path / "serve.log", quiet=True)("listening")
    assert "it is a link" in capsys.readouterr().err
    assert thesis.read_text() == "precious"


def forge(run: Path, setting: str) -> None:
    """Change a run's plan wherever it is kept."""
    plan = change(load(str(run / "plan.toml")), [setting])
    (run / "plan.toml").write_text(plan.to_toml())
    change_journal(run, "UPDATE run SET plan = ?, trajectory_digest = ?", plan.to_toml(), plan.trajectory_digest())


@pytest.mark.parametrize("setting", NAMING)
def test_functions_that_a_plan_in_a_folder_names_are_not_called(
    cli: Cli, finished_run: Path, tmp_path: Path, called: Path, setting: str
) -> None:
    """N17. Whoever can place a file in the current folder and hand over a run must not run code by it."""
    forge(finished_run, setting)
    for command in (["run", "--resume"], ["run", "--baseline", "--resume"], ["export", "--out", tmp_path / "model"]):
        refused(
            cli(*command, finished_run), f"names functions, which this would call: {NAMING[setting]};", "--own-code"
        )
    for harmless in ("report", "status", "verify"):
        cli(harmless, finished_run)
    with pytest.raises(PlanError, match="own_code=True"):
        baffle.resume(finished_run)
    assert not called.exists()
    cli("run", "--resume", finished_run, "--own-code")
    assert called.exists(), "the file would have told if they had been called"


@pytest.mark.parametrize("setting", NAMING)
def test_a_repeated_run_calls_no_functions_either(
    cli: Cli, tiny: Callable[..., Plan], tmp_path: Path, called: Path, setting: str
) -> None:
    """N17, with `run --as`."""
    plan = tiny("ring.n_max=20", "federation.clients=4", "secure.mode=on", setting)
    run = NetworkedRun(plan, tmp_path / "run").whole()
    refused(cli("run", "--as", run, "--out", tmp_path / "again"), NAMING[setting], "--own-code")
    assert not called.exists()


def test_a_planted_baseline_calls_no_functions(cli: Cli, finished_run: Path, called: Path) -> None:
    """N17, with the plan of the baseline, which the run's own plan does not mention."""
    pytest.importorskip("torch")
    shutil.copytree(finished_run, finished_run / "baseline")
    forge(finished_run / "baseline", 'task.data="theirs:data"')
    refused(cli("run", "--quiet", "--baseline", "--resume", finished_run), "theirs:data", "--own-code")
    assert not called.exists()


@pytest.mark.parametrize("setting", [*NAMING][2:])
def test_a_run_of_given_objects_calls_only_those(tmp_path: Path, called: Path, setting: str) -> None:
    """N17, with a run of `baffle.fit`, whose plan could name functions besides the objects."""
    nn = pytest.importorskip("torch").nn
    random = np.random.default_rng(0)
    clients = [(random.random((20, 4), np.float32), random.integers(0, 2, 20)) for _ in range(3)]
    given = {"model": nn.Linear(4, 2), "clients": clients}
    run = baffle.fit(**given, plan={"rounds": 2}, out=tmp_path / "run", progress=False)
    assert baffle.resume(run.path, ["rounds=3"], **given)["rounds"] == 3
    forge(run.path, setting)
    with pytest.raises(PlanError, match=NAMING[setting]):
        baffle.resume(run.path, ["rounds=4"], **given)
    assert not called.exists()


@pytest.mark.parametrize("number", [9 * 10**18, 10**9, 0])
def test_a_number_of_weights_is_not_believed(cli: Cli, finished_run: Path, tmp_path: Path, number: int) -> None:
    """N12. A journal of a few kilobytes took 8 GB, or ended in a traceback."""
    change_journal(finished_run, "UPDATE run SET n_weights = ?", number)
    for command in (
        ["report"],
        ["status"],
        ["watch"],
        ["verify"],
        ["run", "--resume"],
        ["export", "--out", tmp_path / "m"],
    ):
        with at_most(1 << 25):
            refused(cli(*command, finished_run), "no snapshot holds", "the journal is damaged")


def test_many_directions_are_not_drawn_again_for_a_report(cli: Cli, finished_run: Path) -> None:
    """N12, with the number of directions: a round of a million takes minutes, and of a larger model days."""
    forge(finished_run, "probe.k=1000000")
    report(cli, finished_run)
    assert "too many numbers to draw again" in (finished_run / "report.html").read_text()


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        *(
            ("metrics", "record", f'"{name}": {HUGE}}}')
            for name in ("round", "uplink_bytes", "test_accuracy", "seconds")
        ),
        *(("metrics", "record", f'"seconds": {value}}}') for value in ("1e999", "-1e999", "NaN", "-1")),
        *(("rounds", "outcome", encode(Outcome(5, "scalars", groups))) for groups in ((), (Group(0, b"", 1),) * 2)),
        ("rounds", "outcome", encode(Outcome(5, "scalars", (Group(0, bytes(16), 0),)))),
        *(("participation", "round", value) for value in (6, 2**62)),
    ],
)
def test_no_number_ends_a_report_in_a_traceback(
    cli: Cli, finished_run: Path, table: str, column: str, value: object
) -> None:
    """N12, with other numbers of a journal: a command shows them or refuses them."""
    if isinstance(value, str):  # the end of a record: the last of two fields of one name counts
        change_journal(finished_run, "UPDATE metrics SET record = rtrim(record, '}') || ',' || ?", value)
    else:
        change_journal(finished_run, f"UPDATE OR REPLACE {table} SET {column} = ? WHERE round = 5", value)
    for command in ("report", "status"):
        done = cli(command, finished_run)
        assert (done.returncode, done.stderr.count("\n")) in ((0, 0), (2, 1))
    with suppress(BaffleError):
        live = LiveRun(finished_run)
        json.loads(live.news())
        live.metrics()


def test_no_number_of_a_summary_ends_a_report_in_a_traceback(cli: Cli, finished_run: Path) -> None:
    summary = json.loads((finished_run / "summary.json").read_text())
    for name in summary:
        (finished_run / "summary.json").write_text(json.dumps(summary | {name: int(HUGE)}))
        report(cli, finished_run)
