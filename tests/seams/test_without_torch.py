"""A machine without PyTorch: a simulation, a server with its clients, an export, an audit. The model comes as ONNX, or
is the default plan's own."""

import subprocess
import sys
from pathlib import Path

import pytest

from baffle.export import export_plan
from tests.support.blocked_imports import without

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from pathlib import Path
from baffle.journal.audit import verify
from baffle.network.equipment import count_samples, with_onnx
from baffle.network.member import Member
from baffle.network.serve import serve
from baffle.plan import load
from baffle.simulation import resume, simulate
from tests.support.lines_in_memory import LinesInMemory, new_keys

plan_file, model, folder = map(Path, sys.argv[1:])
plan = load(str(plan_file), ['task.model={name="onnx"}', f"run.model={model}", 'secure.mode="on"'])

simulated = simulate(plan, folder / "simulated")
assert simulated["test_accuracy"] > 0.1, simulated
assert resume(folder / "simulated", ["rounds=8"])["rounds"] == 8

keys = new_keys(folder, 3)
members = [
    Member(key, folder / f"state-{key.number}", count_samples(key.number, None, part=True),
           with_onnx(key.number, None, model, part=True))
    for key in keys
]
served = serve(plan, folder / "served", LinesInMemory({m.keys.number: m.answer for m in members}), keys[0].roster)
assert verify(folder / "served").weights_sha256 == served["weights_sha256"]
assert {"torch", "onnx"}.isdisjoint(sys.modules), "PyTorch was imported"
print("done")
"""


DEFAULT_PLAN = """
from pathlib import Path
from baffle.export import export_plan, export_run
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.network.equipment import count_samples, with_onnx, with_plan
from baffle.network.member import Member
from baffle.network.serve import serve
from baffle.plan import load
from baffle.repetition import repeat
from baffle.simulation import resume, simulate
from tests.support.lines_in_memory import LinesInMemory, new_keys

folder = Path(sys.argv[1])
plan = load("digits", ["rounds=20"])
simulated = simulate(plan, folder / "simulated")
assert simulated["test_accuracy"] > 0.4, simulated
assert resume(folder / "simulated", ["rounds=22"])["rounds"] == 22
export_run(folder / "simulated", folder / "model")

few = ["rounds=2", "federation.clients=4"]
plan = load("digits", few)
export_plan("digits", folder / "untrained", few)
keys = new_keys(folder, 4)
equip = {number: with_plan(number, None, part=True) for number in range(4)}
equip[3] = with_onnx(3, None, folder / "untrained", part=True)
members = [
    Member(key, folder / f"state-{key.number}", count_samples(key.number, None, part=True), equip[key.number])
    for key in keys
]
served = serve(plan, folder / "served", LinesInMemory({m.keys.number: m.answer for m in members}), keys[0].roster)
with Journal.open(folder / "served" / "journal.sqlite") as journal:
    assert journal.participation.contributors(1) == {0, 1, 2, 3}
assert verify(folder / "served").weights_sha256 == served["weights_sha256"]
assert repeat(folder / "served", folder / "again")["weights_sha256"] == served["weights_sha256"]
assert {"torch", "sklearn"}.isdisjoint(sys.modules)
print("done")
"""


def test_the_default_plan_needs_neither_pytorch_nor_scikit_learn(tmp_path: Path) -> None:
    blocked = ("torch", "onnxscript", "sklearn", "scipy", "flwr", "matplotlib", "PIL")
    done = subprocess.run(
        [sys.executable, "-c", without(*blocked) + DEFAULT_PLAN, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.parametrize("blocked", [("torch",), ("torch", "onnx", "onnxscript", "flwr")])
def test_a_simulation_and_a_server_of_an_onnx_plan_need_no_pytorch(
    tiny_toml: Path, tmp_path: Path, blocked: tuple[str, ...]
) -> None:
    export_plan(str(tiny_toml), tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", without(*blocked) + PROGRAM, str(tiny_toml), str(tmp_path / "model"), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
