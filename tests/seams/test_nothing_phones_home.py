"""Nothing phones home: a run on ONNX Runtime opens no socket and writes nothing outside its folders.

A hook in Python cannot see what native code does. But the telemetry of ONNX Runtime begins with the import: it writes a
device id below the home folder and starts threads, and both can be seen at once. Its first message leaves seconds
later, so only the slow test sees whether there is one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baffle.export import export_plan

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, sys, time

def refuse(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        raise PermissionError(f"{event} {arguments}")

sys.addaudithook(refuse)
from pathlib import Path
from baffle.network.member.equipment import with_onnx
from baffle.network.member.member import Member
from baffle.network.server.serve import serve
from baffle.plan import load
from baffle.simulation import simulate
from tests.support.lines_in_memory import LinesInMemory, new_keys

plan_file, model, folder = map(Path, sys.argv[1:4])
plan = load(str(plan_file), ["task.init=numpy", "run.runtime=onnx", "secure.mode=on", "rounds=2"])
assert simulate(plan, folder / "simulated")["rounds"] == 2
keys = new_keys(folder, 3)
members = [
    Member(key, folder / f"state-{key.number}", with_onnx(key.number, None, model, part=True))
    for key in keys
]
lines = LinesInMemory({member.keys.number: member.answer for member in members})
assert serve(plan, folder / "served", lines, keys[0].roster)["rounds"] == 2
assert "onnxruntime" in sys.modules
print("threads:", len(os.listdir("/proc/self/task")))
time.sleep(float(sys.argv[4]))
"""


def run_at_home(home: Path, *command: object) -> str:
    """Run a command with an empty home folder, which must stay empty. Returns what it prints."""
    home.mkdir()
    hidden = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(home), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(home.rglob("*")) == []
    return done.stdout


@pytest.fixture
def program(tmp_path: Path, tiny_toml: Path) -> list[object]:
    """The program, which then waits for so many seconds."""
    export_plan(str(tiny_toml), tmp_path / "model", ["task.init=numpy"])
    return [sys.executable, "-c", PROGRAM, tiny_toml, tmp_path / "model", tmp_path]


@pytest.fixture
def strace(tmp_path: Path) -> list[object]:
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    return ["strace", "-qqfe", "%network", "-o", tmp_path / "trace"]


def test_a_run_opens_no_socket_and_leaves_the_home_folder_empty(tmp_path: Path, program: list[object]) -> None:
    assert run_at_home(tmp_path / "home", *program, 0) == "threads: 1\n"


@pytest.mark.slow
def test_no_system_call_is_about_the_internet(tmp_path: Path, program: list[object], strace: list[object]) -> None:
    """ONNX Runtime with its telemetry asks for its host's address within seconds."""
    run_at_home(tmp_path / "home", *strace, *program, 10)
    assert "AF_INET" not in (tmp_path / "trace").read_text()


@pytest.mark.slow
def test_the_processes_of_a_sweep_phone_nobody_either(tmp_path: Path, tiny_toml: Path, strace: list[object]) -> None:
    settings = ["--set", "run.runtime=onnx", "--set", "task.init=numpy", "--set", "rounds=400"]
    sweep = [sys.executable, "-m", "baffle.cli.main", "sweep", tiny_toml, "--seeds", "0..1", "--jobs", "2", "--quiet"]
    run_at_home(tmp_path / "home", *strace, *sweep, *settings, "--out", tmp_path / "sweep")
    assert len([*(tmp_path / "sweep").rglob("summary.json")]) >= 2
    assert "AF_INET" not in (tmp_path / "trace").read_text()
