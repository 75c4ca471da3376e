"""Bad input gives one clear line and exit code 2, never a traceback, and no file is lost."""

import gzip
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from baffle.errors import PlanError
from baffle.journal.folder import new_folder
from tests.support.command_line import Cli, refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("probe.sigm=1", ["probe.sigm", "did you mean probe.sigma?"]),
        ("prob.k=1", ["prob", "did you mean probe?"]),
        ("probe.k=many", ["probe.k", "int", "many"]),
        ("probe.k=0", ["probe.k", ">= 1", "0"]),
        ("probe.sigma=-0.5", ["probe.sigma", "> 0", "-0.5"]),
        ("probe.sigma=1e-12", ["probe.sigma", "1e-12", "below the precision", "use at least"]),
        ("ring.d_max=1e9", ["ring.d_max", "too coarse"]),
        ("federation.clients=1439", ["federation.clients", "1439", "1438 samples"]),
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
def test_a_bad_setting(cli: Cli, tiny_toml: Path, tmp_path: Path, text: str, words: list[str]) -> None:
    refused(cli("run", tiny_toml, "--set", text, "--out", tmp_path / "run"), *words)
    refused(cli("plan", tiny_toml, "--set", text), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("rum", ["rum", "--help"]),
        ("run --rounds 5", ["--set rounds=5"]),
        ("run a b", ["b", "--help"]),
        ("run --set", ["--set", "--help"]),
        ("verify", ["FOLDER", "--help"]),
        ("run missing.toml", ["missing.toml", "No such file"]),
        ("plan missing.toml", ["missing.toml", "No such file"]),
        ("run digit", ["did you mean digits?", "paper-mnist-lenet"]),
        ("run broken.toml", ["broken.toml", "TOML"]),
        ("verify .", ["holds no run", "plan.toml"]),
        ("verify missing", ["holds no run", "plan.toml"]),
        ("run --resume .", ["holds no run", "plan.toml"]),
        ("run tiny.toml --resume .", ["PLAN", "--resume"]),
        ("run --resume . --out run", ["--out", "--resume"]),
        ("run tiny.toml --out .", ["not empty", "--out"]),
        ("run tiny.toml --out file", ["file"]),
        ("run tiny.toml --set secure.mode=on --out file/run", ["file/run"]),
        ("run tiny.toml --out run --baseline --set federation.tiers=[{k=2,share=0.34}]", ["tiers"]),
        ("tune tiny.toml --set estimator=backprop", ["estimator:"]),
        ("export --out model", ["expected one thing to export"]),
        (
            "export tiny.toml --out model --freeze x",
            ["--freeze, --loss, --shape, --head, --train, --beside and --output belong"],
        ),
        ("export --onnx file --out model --loss hinge", ["--loss: expected cross_entropy, mse, mae, bce or none"]),
        ("export --onnx file --out model --shape one", ["--shape: expected the sizes of one sample"]),
        ("export --onnx file --out model --shape a=1 --shape 2", ["--shape: expected NAME=SIZES"]),
    ],
)
def test_a_bad_command_line(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny_toml, "tiny.toml")
    (tmp_path / "broken.toml").write_text("rounds = [1,\n\n\n")
    (tmp_path / "file").touch()
    before = set(tmp_path.rglob("*"))
    refused(cli(*arguments.split()), *words)
    assert set(tmp_path.rglob("*")) == before


BAD_FOLDER_NAMES = [
    *("", " ", ".", "..", ".hidden", "../x", "../../x", "a/b", "a/../../../x", "x/", "/tmp/x", "a\\b", "..\\..\\x"),
    *("a\0b", "a\nb", "a\rerror: b", "\x1b[2Ja", "a\u202eb", os.fsdecode(b"a\xffb")),
    *("x" * 201, "é" * 101, "x" * 100_000),
]


@pytest.mark.parametrize("name", BAD_FOLDER_NAMES, ids=lambda name: ascii(name)[:20])
def test_a_plans_name_that_cannot_name_a_folder_under_runs(name: str) -> None:
    expected = r"^name: expected .*got '.*--set name=NAME.*--out"
    with pytest.raises(PlanError, match=expected) as refusal, new_folder(name):
        pass
    assert len(str(refusal.value)) < 500
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("name", ["v1.2", "k=50, σ small", "-x", "~", "x" * 200, "é" * 100])
def test_a_plans_name_that_names_a_folder_under_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with new_folder(name) as folder:
        assert folder.is_dir()
        assert folder.parent == Path("runs")
        assert folder.name.startswith(f"{name}-")
    assert not Path("runs").exists()


def test_runs_that_start_in_the_same_second_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    together = Barrier(8)

    def claim(_: int) -> Path:
        with new_folder("mine") as folder:
            together.wait(60)
            (folder / "plan.toml").touch(exist_ok=False)
            return folder

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(claim, range(8)))) == len(list(Path("runs").iterdir())) == 8


def test_no_run_is_kept_where_runs_is_a_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    refused(cli("run", "-q"), "runs", "cannot be made", "--out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--rounds", "3"], "No such option '--rounds'; it is a setting of the plan: --set rounds=3\n"),
        (["plan", "digits", "--probe-k=7"], "'--probe-k'; it is a setting of the plan: --set probe.k=7\n"),
        (["tune", "--clip"], "a setting of the plan: --set update.clip=VALUE or --set privacy.clip=VALUE\n"),
        (["verify", "--rounds", "3"], "No such option '--rounds'. (see baffle --help)\n"),
        (["run", "--wings", "3"], "No such option '--wings'. (see baffle --help)\n"),
    ],
)
def test_a_setting_that_is_given_as_an_option_is_shown_as_a_setting(cli: Cli, arguments: list[str], words: str) -> None:
    refused(cli(*arguments), words)


def test_a_tuned_plan_that_cannot_be_written_is_refused_before_the_trials(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(*_arguments: object, **_named: object) -> None:
        raise AssertionError("trials began")

    monkeypatch.setattr("baffle.tune.tuning.tune", tune)
    (tmp_path / "file").touch()
    for out in (tmp_path / "missing" / "a.toml", tmp_path, tmp_path / "file" / "a.toml"):
        refused(cli("tune", tiny_toml, "--out", out), f"{out} cannot be written", "give another --out")


def test_with_out_a_plan_may_have_any_name(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan, run, name = tmp_path / "named.toml", tmp_path / "run", "../../a\0b\n" + "x" * 1000
    plan.write_text(tiny_toml.read_text().replace('"tiny"', json.dumps(name)))
    refused(cli("run", plan), "name: expected")
    assert cli("run", plan, "--out", run, "-q").returncode == 0
    assert json.loads((run / "summary.json").read_text())["name"] == name
    assert cli("verify", run, "-q").returncode == 0
    assert cli("run", "--resume", run, "--set", "rounds=7", "-q").returncode == 0
    assert set(tmp_path.iterdir()) == {plan, run}


def test_missing_data_says_where_to_get_it(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["run", "paper-mnist-lenet", "--out", tmp_path / "run"], ["plan", "paper-mnist-lenet"]):
        monkeypatch.delenv("BAFFLE_DATA", raising=False)
        refused(cli(*arguments), "yann.lecun.com/exdb/mnist", "--data", "BAFFLE_DATA")
        refused(cli(*arguments, "--data", tmp_path / "none"), str(tmp_path / "none"), "yann.lecun.com/exdb/mnist")
        monkeypatch.setenv("BAFFLE_DATA", str(tmp_path))
        refused(cli(*arguments), str(tmp_path), "yann.lecun.com/exdb/mnist")
    assert not (tmp_path / "run").exists()


def test_a_corrupt_idx_file_is_named(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.parent.mkdir()
    for content in (b"", gzip.compress(bytes(99), mtime=0)[:20], gzip.compress(bytes(99), mtime=0)):
        path.write_bytes(content)
        refused(cli("run", "paper-mnist-lenet", "--data", tmp_path, "--out", tmp_path / "run"), str(path))


def test_files_that_are_not_a_journal_or_a_plan(cli: Cli, finished_run: Path) -> None:
    for content in (b"", b"nothing of the kind" * 500, b"SQLite format 3\0" + bytes(4080)):
        (finished_run / "journal.sqlite").write_bytes(content)
        refused(cli("verify", finished_run), "journal.sqlite")
        if content:
            refused(cli("run", "--resume", finished_run), "journal.sqlite")
    for content in (b"\xff\xfe", b"rounds = = 3", b"rouns = 3"):
        (finished_run / "plan.toml").write_bytes(content)
        refused(cli("verify", finished_run))
        refused(cli("run", "--resume", finished_run))
