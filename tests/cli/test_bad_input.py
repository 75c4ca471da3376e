"""Bad input gives one clear line and exit code 2, never a traceback, and no file is lost."""

import gzip
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Cli = Callable[..., CompletedProcess[str]]


def _one_line(done: CompletedProcess[str], *words: str) -> str:
    assert done.returncode == 2
    assert done.stdout.strip() == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    assert "Traceback" not in done.stderr
    for part in words:
        assert part in done.stderr
    return done.stderr


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("probe.sigm=1", ["probe.sigm", "did you mean probe.sigma?"]),
        ("prob.k=1", ["prob", "did you mean probe?"]),
        ("probe.k=many", ["probe.k", "int", "many"]),
        ("probe.k=0", ["probe.k", ">= 1", "0"]),
        ("probe.k=-5", ["probe.k", ">= 1", "-5"]),
        ("probe.sigma=0", ["probe.sigma", "> 0", "0"]),
        ("probe.sigma=-0.5", ["probe.sigma", "> 0", "-0.5"]),
        ("probe.sigma=1e-12", ["probe.sigma", "1e-12", "below the precision", "use at least"]),
        ("ring.d_max=1e9", ["ring.d_max", "too coarse"]),
        ("federation.clients=1439", ["federation.clients", "1439", "1438 samples"]),
        ("federation.clients=0", ["federation.clients", ">= 1"]),
        ("federation.participation=0", ["federation.participation"]),
        ("federation.participation=2", ["federation.participation"]),
        ("task.data=cifar", ["task.data", "cifar", "digits, mnist"]),
        ("task.data=no_such_module:f", ["no_such_module:f", "cannot be imported"]),
        ('task.model={name="custom", factory="math:pi"}', ["math:pi"]),
        ('task.model={name="custom", factory="os:getcwd"}', ["os:getcwd", "nn.Module", "str"]),
        ("federation.dropout=1", ["federation.dropout", "< 1"]),
        ("secure.mode=maybe", ["secure.mode", "maybe", "'on'", "'off'"]),
        ("secure.floor=1", ["secure.floor", ">= 2"]),
        ("run.device=abacus", ["run.device", "abacus"]),
        ("rounds", ["section.key=value", "rounds"]),
    ],
)
def test_a_bad_setting(cli: Cli, tiny_toml: Path, tmp_path: Path, command: str, setting: str, words: list[str]) -> None:
    out = ["--out", tmp_path / "run"] if command == "run" else []
    _one_line(cli(command, tiny_toml, "--set", setting, *out), *words)
    assert not (tmp_path / "run").exists()


BAD_FOLDER_NAMES = [
    "",
    " ",
    ".",
    "..",
    ".hidden",
    "../x",
    "../../x",
    "a/b",
    "a/../../../x",
    "x/",
    "a\\b",
    "..\\..\\x",
    "a\0b",
    "a\nb",
    "a\rerror: b",
    "\x1b[2Ja",
    "a\u202eb",
    "x" * 201,
    "é" * 101,
    "x" * 100_000,
]


@pytest.fixture
def named(tiny_toml: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Writes the tiny plan under another name."""

    def write(name: str) -> Path:
        path = tmp_path / "named.toml"
        path.write_text(tiny_toml.read_text().replace('"tiny"', json.dumps(name)))
        return path

    return write


def _below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("name", BAD_FOLDER_NAMES, ids=lambda name: ascii(name)[:20])
def test_a_plans_name_that_cannot_name_a_folder_under_runs(
    cli: Cli, named: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here = tmp_path / "deep" / "down"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    plan = named(name)
    before = _below(tmp_path)
    line = _one_line(cli("run", plan), "error: name: expected", "got '", "--set name=NAME", "--out")
    assert len(line) < 500
    assert line[:-1].isprintable()
    assert _below(tmp_path) == before


def test_an_absolute_path_as_a_plans_name(
    cli: Cli, named: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = named(f"{tmp_path}/elsewhere/x")
    _one_line(cli("run", plan), "name: expected")
    assert _below(tmp_path) == {plan}


def test_a_plans_name_that_is_not_valid_unicode(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    undecodable = os.fsdecode(b"a\xffb")
    _one_line(cli("run", tiny_toml, "--set", f"name={undecodable}"), "name: expected")
    assert _below(tmp_path) == set()


@pytest.mark.parametrize("name", ["", "..", "../../x", "a\0b", "a\nb", "x" * 1000], ids=lambda name: ascii(name)[:20])
def test_with_out_a_plan_may_have_any_name(cli: Cli, named: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    plan = named(name)
    assert cli("run", plan, "--out", tmp_path / "run", "-q").returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["name"] == name
    assert cli("verify", tmp_path / "run", "-q").returncode == 0
    assert cli("run", "--resume", tmp_path / "run", "--set", "rounds=7", "-q").returncode == 0
    assert _below(tmp_path) == {plan, tmp_path / "run", *_below(tmp_path / "run")}


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_plan_that_does_not_exist(cli: Cli, tmp_path: Path, command: str) -> None:
    _one_line(cli(command, tmp_path / "missing.toml"), "missing.toml", "No such file")
    _one_line(cli(command, "digit"), "did you mean digits?", "paper-mnist-lenet")
    (tmp_path / "broken.toml").write_text("rounds = [1,\n\n\n")
    _one_line(cli(command, tmp_path / "broken.toml"), "broken.toml", "TOML")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rum"], ["rum"]),
        (["run", "--rounds", "5"], ["--rounds"]),
        (["run", "a", "b"], ["b"]),
        (["verify"], ["FOLDER"]),
        (["run", "--set"], ["--set"]),
    ],
)
def test_a_misused_command_line(cli: Cli, arguments: list[str], words: list[str]) -> None:
    _one_line(cli(*arguments), *words, "--help")


@pytest.mark.parametrize("command", ["run", "plan"])
def test_missing_data_says_where_to_get_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv("BAFFLE_DATA", raising=False)
    arguments = [command, "paper-mnist-lenet", *(["--out", tmp_path / "run"] if command == "run" else [])]
    _one_line(cli(*arguments), "yann.lecun.com/exdb/mnist", "--data", "BAFFLE_DATA")
    _one_line(cli(*arguments, "--data", tmp_path / "none"), str(tmp_path / "none"), "yann.lecun.com/exdb/mnist")
    monkeypatch.setenv("BAFFLE_DATA", str(tmp_path))
    _one_line(cli(*arguments), str(tmp_path), "yann.lecun.com/exdb/mnist")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\x08\x03", gzip.compress(bytes(99), mtime=0)[:20], gzip.compress(bytes(99), mtime=0)]
)
def test_a_corrupt_idx_file_is_named(cli: Cli, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.parent.mkdir()
    path.write_bytes(content)
    _one_line(cli("run", "paper-mnist-lenet", "--data", tmp_path, "--out", tmp_path / "run"), str(path))
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_another_run(cli: Cli, tiny_toml: Path, finished_run: Path) -> None:
    _one_line(cli("run", tiny_toml, "--out", finished_run), "holds another run", "--resume")
    assert cli("verify", finished_run, "-q").returncode == 0


def test_a_folder_that_holds_something_else(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    _one_line(cli("run", tiny_toml, "--out", tmp_path), "not empty", "thesis.tex", "--out")
    assert (tmp_path / "thesis.tex").read_text() == "all of it"


def test_a_folder_that_cannot_be_made(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _one_line(cli("run", tiny_toml, "--out", tmp_path / "file"), str(tmp_path / "file"))
    within = tmp_path / "file" / "run"
    _one_line(cli("run", tiny_toml, "--set", "secure.mode=on", "--out", within), str(within))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(cli: Cli, tiny_toml: Path, finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    _one_line(cli("run", tiny_toml, "--out", tmp_path / "locked" / "run"), "Permission denied")
    finished_run.chmod(0o500)
    try:
        assert cli("verify", finished_run, "-q").returncode == 0
        _one_line(cli("run", "--resume", finished_run, "--set", "rounds=8"), "cannot be written")
    finally:
        finished_run.chmod(0o700)


def test_a_journal_of_another_plan(cli: Cli, tiny_toml: Path, finished_run: Path, tmp_path: Path) -> None:
    cli("run", tiny_toml, "--set", "probe.k=5", "--out", tmp_path / "other", "-q")
    shutil.copy(tmp_path / "other" / "journal.sqlite", finished_run / "journal.sqlite")
    _one_line(cli("run", "--resume", finished_run), "journal.sqlite", "another plan")
    _one_line(cli("verify", finished_run), "another run")


def test_a_journal_of_another_version(cli: Cli, finished_run: Path) -> None:
    db = sqlite3.connect(finished_run / "journal.sqlite")
    db.execute("UPDATE run SET format = 'baffle-journal/9'")
    db.commit()
    db.close()
    for arguments in (["run", "--resume", finished_run], ["verify", finished_run]):
        _one_line(cli(*arguments), "baffle-journal/9", "baffle-journal/1", "another version")


@pytest.mark.parametrize("content", [b"", b"nothing of the kind" * 500, b"SQLite format 3\0" + bytes(4080)])
def test_a_file_that_is_not_a_journal(cli: Cli, finished_run: Path, content: bytes) -> None:
    (finished_run / "journal.sqlite").write_bytes(content)
    _one_line(cli("verify", finished_run), "journal.sqlite")
    if content:
        _one_line(cli("run", "--resume", finished_run), "journal.sqlite")


def test_a_folder_without_a_run(cli: Cli, tmp_path: Path) -> None:
    for arguments in (["run", "--resume", tmp_path], ["verify", tmp_path], ["verify", tmp_path / "missing"]):
        _one_line(cli(*arguments), "holds no run", "plan.toml")


def test_a_plan_beside_the_journal_that_cannot_be_read(cli: Cli, finished_run: Path) -> None:
    for content in (b"\xff\xfe", b"rounds = = 3", b"rouns = 3"):
        (finished_run / "plan.toml").write_bytes(content)
        _one_line(cli("verify", finished_run))
        _one_line(cli("run", "--resume", finished_run))


def test_a_resumed_run_keeps_its_plan_and_folder(cli: Cli, tiny_toml: Path, finished_run: Path, tmp_path: Path) -> None:
    before = (finished_run / "plan.toml").read_bytes()
    _one_line(cli("run", "--resume", finished_run, "--set", "probe.k=5"), "rounds, run.* and secure.*")
    _one_line(cli("run", "--resume", finished_run, "--set", "probe.kk=5"), "did you mean probe.k?")
    _one_line(cli("run", tiny_toml, "--resume", finished_run), "PLAN", "--resume")
    _one_line(cli("run", "--resume", finished_run, "--out", tmp_path / "run"), "--out", "--resume")
    assert (finished_run / "plan.toml").read_bytes() == before
    assert cli("verify", finished_run, "-q").returncode == 0


def test_a_run_whose_rounds_all_fail_stops_with_one_line(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    settings = ["update.rate=1e30", 'task.model={name="lenet", channels=[2, 3]}', "rounds=40"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "-q", *arguments)
    _one_line(done, "10 rounds in a row", "no client's loss was finite", str(tmp_path / "run"))


def test_a_baseline_that_cannot_be_trained_is_refused_before_the_run(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    tiers = "federation.tiers=[{k=2, share=0.34}]"
    done = cli("run", tiny_toml, "--out", tmp_path / "run", "--set", tiers, "--baseline", "--json")
    if done.returncode:
        _one_line(done, "tiers")
        assert not (tmp_path / "run").exists()
    else:
        assert "baseline_test_accuracy" in json.loads(done.stdout)
