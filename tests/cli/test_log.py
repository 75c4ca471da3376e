"""What a server and a client log: the lines, the file, and what strangers cannot do to either."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import PIPE
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from baffle.cli import log as log_module
from baffle.cli.log import MOST_CHARACTERS, Log, Style, older


def says(file: Path) -> list[str]:
    return [json.loads(line)["says"] for line in file.read_text().splitlines()]


def near(moment: str) -> bool:
    """Whether a time in a log is about now."""
    return abs(datetime.fromisoformat(moment) - datetime.now(UTC)) < timedelta(minutes=5)


def test_a_line_has_the_time_and_who_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Log("text", "client 3", tmp_path / "join.log")("takes part")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", (tmp_path / "join.log").read_text())
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ) client 3: takes part\n", shown.err)
    assert match
    assert near(match[1])

    Log("json", "server", tmp_path / "serve.log")("client 3 takes part: “é”")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", (tmp_path / "serve.log").read_text())
    record = json.loads(shown.err)
    assert list(record) == ["time", "who", "says"]
    assert (record["who"], record["says"]) == ("server", "client 3 takes part: “é”")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["time"])
    assert near(record["time"])


def test_a_log_may_only_print_or_only_write_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Log("text", "server")("listening")
    assert capsys.readouterr().err.endswith("server: listening\n")
    file = tmp_path / "new" / "serve.log"
    for start in ("first", "x" * 10_000):  # a later log appends to the file
        Log("json", "server", file, quiet=True)(start)
    assert capsys.readouterr() == ("", "")
    assert says(file) == ["first", "x" * (MOST_CHARACTERS - 1) + "…"]
    file.write_text('{"time": "20')  # a process was killed in the middle of a line
    Log("json", "server", file, quiet=True)("back")
    cut, whole = file.read_text().splitlines()
    assert (cut, json.loads(whole)["says"]) == ('{"time": "20', "back")


@pytest.mark.parametrize("style", ["text", "json"])
@given(message=st.text() | st.text("\x1b\x9b\r\n\u2028\u202e\ud800\0[31mx"))
def test_whatever_a_stranger_says_is_one_printable_line(
    style: Style, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("log") / "serve.log"
    Log(style, "server", file, quiet=True)(f"<{message}>")
    (line,) = file.read_bytes().decode().removesuffix("\n").split("\n")
    assert line.isprintable()
    shown = json.loads(line)["says"] if style == "json" else line.partition("server: ")[2]
    assert shown.isprintable()
    assert shown.split() == "".join(c for c in f"<{message}>" if c.isprintable() or c.isspace()).split()


def test_a_file_that_has_grown_large_becomes_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MOST_BYTES", 1_000)
    file = tmp_path / "serve.log"
    log = Log("json", "server", file, quiet=True)
    for number in range(100):
        log(str(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["serve.log", "serve.log.1"]
    kept = says(older(file)) + says(file)
    assert kept == [str(number) for number in range(100 - len(kept), 100)]
    assert 1_000 <= older(file).stat().st_size < 1_100
    assert file.stat().st_size < 1_000


def test_a_full_disk_stops_nothing_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.log"
    log = Log("json", "server", file, quiet=True)
    with monkeypatch.context() as full:
        full.setattr("os.open", Mock(side_effect=OSError(28, "No space left on device")))
        for number in range(3):
            log(str(number))
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{file} cannot be written: No space left on device" in json.loads(said)["says"]
    log("3")
    log("4")
    assert says(file) == ["3 lines are missing here: the file could not be written", "3", "4"]
    assert capsys.readouterr().err == ""


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    log, words = Log("json", "server", tmp_path / "log", quiet=True), [str(number) for number in range(200)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(log, words))
    assert sorted(says(tmp_path / "log")) == sorted(words)


@pytest.mark.parametrize("stderr", ["none", "closed", "a broken pipe"])
def test_a_run_goes_on_when_nobody_reads_stderr(tmp_path: Path, stderr: str) -> None:
    script = (
        "import os, pathlib, sys\n"
        "from baffle.cli.log import Log\n"
        "log = Log('json', 'server', pathlib.Path(sys.argv[1]))\n"
        "if sys.argv[2] == 'closed': sys.stderr.close()\n"
        "if sys.argv[2] == 'none': sys.stderr = None\n"
        "log('one'); log('two')\n"
        "os._exit(7)\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-c", script, tmp_path / "log", stderr], stdout=PIPE, stderr=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stdout) == (7, b"")
    assert says(tmp_path / "log") == ["one", "two"]


def test_a_log_needs_no_other_library() -> None:
    """A client on a small device uses it."""
    script = "import sys; import baffle.cli.log; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    loaded = set(done.stdout.split())
    assert "baffle" in loaded, done.stderr
    assert loaded.isdisjoint({"rich", "numpy", "msgspec", "torch", "click"})
