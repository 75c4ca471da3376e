"""A run's folder: which folders are accepted, the lock, and how files are written."""

import json
import os
import shutil
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from baffle.errors import RunFolderError
from baffle.journal.folder import SUMMARY_BYTES, RunFolder
from tests.support.memory import at_most


def test_a_missing_or_empty_folder_is_made_when_it_is_entered(tmp_path: Path) -> None:
    new = RunFolder.new(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with new as folder:
        folder.write_plan("x = 1\n")
    assert (tmp_path / "a" / "b" / "plan.toml").read_text() == "x = 1\n"
    with RunFolder.new(tmp_path / "c"):
        pass
    for log in ("serve.log", "serve.log.1"):  # a server logs before its run begins, also when it fails to begin
        (tmp_path / "c" / log).touch()
    (tmp_path / "c" / ".baffle-0123456789abcdef.new").write_text("x =")  # a kill during the first write leaves this
    with RunFolder.new(tmp_path / "c") as folder:
        folder.write_plan("x = 1\n")
    assert sorted(path.name for path in folder.path.iterdir()) == ["plan.toml", "serve.log", "serve.log.1"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("plan.toml", r"holds another run.*--resume.*in Python baffle\.resume.*--out, in Python out="),
        ("thesis.tex", r"not empty \(it holds thesis\.tex\).*--out, in Python out="),
    ],
)
def test_a_folder_that_holds_a_run_or_something_else_is_not_used(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(RunFolderError, match=words):
        RunFolder.new(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"file cannot be used for a run: Not a directory.*--out"):
        RunFolder.new(tmp_path / "file")
    with pytest.raises(RunFolderError, match="cannot be used for a run"), RunFolder.new(tmp_path / "file" / "run"):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_below_a_read_only_one_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunFolderError, match="Permission denied"), RunFolder.new(tmp_path / "run"):
            pass
    finally:
        tmp_path.chmod(0o700)


def test_only_a_folder_with_a_plan_is_an_existing_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunFolderError, match=r"holds no run: expected a folder with plan\.toml"):
            RunFolder.existing(path)
    (tmp_path / "plan.toml").touch()
    assert RunFolder.existing(tmp_path).path == tmp_path


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path), pytest.raises(RunFolderError, match="in use by another process"), RunFolder(tmp_path):
        pass
    with RunFolder(tmp_path):
        pass


def test_files_are_written_whole(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.write_metrics([{"round": 0}, {"round": 1}])
        folder.add_metrics({"round": 2})
        folder.write_summary({"rounds": 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"round": 0}, {"round": 1}, {"round": 2}]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"rounds": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_a_file_that_cannot_be_written_says_how_to_go_on_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path) as folder:
        folder.write_summary({"rounds": 3})
        monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("broken")))
        with pytest.raises(RunFolderError, match=r"summary\.json cannot be written: .*baffle run --resume"):
            folder.write_summary({"rounds": 4})
        assert json.loads((tmp_path / "summary.json").read_text()) == {"rounds": 3}


def test_a_folder_that_vanishes_is_reported(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunFolderError, match=r"metrics\.jsonl cannot be written: No such file"):
            folder.add_metrics({"round": 0})
        with pytest.raises(RunFolderError, match=r"plan\.toml cannot be written"):
            folder.write_plan("")


def test_a_runs_folder_and_files_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    with RunFolder.new(tmp_path / "run") as folder:
        folder.write_plan("x = 1\n")
        folder.add_metrics({"round": 0})
        folder.write_summary({"rounds": 1})
    os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    assert len(list(folder.path.iterdir())) == 3


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"[" * 1_000_000, b"[]", b"null", b" " * (SUMMARY_BYTES + 1)])
def test_a_summary_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    folder = RunFolder(tmp_path)
    if content is not None:
        folder.summary.write_bytes(content)
    with at_most(8 << 20), pytest.raises(RunFolderError, match=r"summary\.json cannot be read"):
        folder.read_summary()
    folder.summary.write_bytes(b'{"rounds": 3}')
    assert folder.read_summary() == {"rounds": 3}
