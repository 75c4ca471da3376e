"""Where reports and their script lie, and the command that writes them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baffle.errors import PageError
from baffle.report.writing import drawing_script, script_name, write_report

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_a_report_lies_in_its_run_s_folder_with_the_script_beside_it(finished_run: Path) -> None:
    page = write_report([finished_run])
    assert page == finished_run / "report.html"
    assert (finished_run / script_name()).read_bytes() == drawing_script().read_bytes()
    assert f'src="{script_name()}"' in page.read_text()


def test_runs_share_one_script(finished_run: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    folder = finished_run.rename(runs / "mine")
    page = write_report([folder])
    assert not (folder / script_name()).exists()
    assert (runs / script_name()).exists()
    assert f'src="../{script_name()}"' in page.read_text()


def test_a_standalone_report_holds_its_script(finished_run: Path, tmp_path: Path) -> None:
    page = write_report([finished_run], tmp_path / "page.html", standalone=True)
    assert {file.name for file in tmp_path.iterdir()} == {"page.html", finished_run.name}
    text = page.read_text()
    assert drawing_script().read_text() in text
    assert "src=" not in text.partition("<body")[2].partition("<script>")[0]
    assert " file:" not in text.partition("<title>")[0]


def test_a_page_that_cannot_be_written_is_one_line(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PageError, match="cannot be written"):
        write_report([finished_run], tmp_path / "file" / "page.html")


def test_the_command(cli: Cli, finished_run: Path, tmp_path: Path) -> None:
    done = cli("report", finished_run, "--out", tmp_path / "page.html")
    assert (done.returncode, done.stdout) == (0, f"report: {tmp_path / 'page.html'}\n")
    assert cli("report", finished_run, "--quiet").stdout == ""
    assert (finished_run / "report.html").exists()
    nothing = cli("report", tmp_path / "nothing")
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("error: ")
    assert "holds no run" in nothing.stderr


def test_a_run_writes_its_report_and_names_it(cli: Cli, tiny_toml: Path, tmp_path: Path) -> None:
    done = cli("run", tiny_toml, "--out", tmp_path / "run")
    assert done.stdout.splitlines()[-1].split() == ["report", str(tmp_path / "run" / "report.html")]
    assert (tmp_path / "run" / "report.html").exists()
    cli("run", tiny_toml, "--out", tmp_path / "for-a-script", "--json")
    assert not (tmp_path / "for-a-script" / "report.html").exists()


def test_without_plotly_a_run_says_what_to_install_and_a_report_is_refused(
    cli: Cli, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("baffle.report.writing.find_spec", lambda _name: None)
    done = cli("run", tiny_toml, "--out", tmp_path / "run")
    assert done.returncode == 0
    assert "pip install 'baffle[report]'" in done.stderr
    refused = cli("report", tmp_path / "run")
    assert refused.returncode == 2
    assert refused.stderr == "error: this command needs plotly: pip install 'baffle[report]'\n"
