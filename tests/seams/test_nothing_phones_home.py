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


def run_at_home(tmp_path: Path, tiny_toml: Path, home: Path, *before: str, wait: int = 0) -> None:
    """Run the program with an empty home folder, which must stay empty."""
    export_plan(str(tiny_toml), tmp_path / "model", ["task.init=numpy"])
    home.mkdir()
    hidden = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(home), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    arguments = [tiny_toml, tmp_path / "model", tmp_path, str(wait)]
    command = [*before, sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("threads: 1\n", "")
    assert list(home.rglob("*")) == []


def test_a_run_opens_no_socket_and_leaves_the_home_folder_empty(tmp_path: Path, tiny_toml: Path) -> None:
    run_at_home(tmp_path, tiny_toml, tmp_path / "home")


@pytest.mark.slow
def test_no_system_call_is_about_the_internet(tmp_path: Path, tiny_toml: Path) -> None:
    """ONNX Runtime with its telemetry asks for its host's address within seconds."""
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    trace = tmp_path / "trace"
    run_at_home(tmp_path, tiny_toml, tmp_path / "home", "strace", "-qqfe", "%network", "-o", str(trace), wait=10)
    assert "AF_INET" not in trace.read_text()
