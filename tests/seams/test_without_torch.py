"""A machine without PyTorch: a simulation, a server with its clients, an export, an audit. The model comes as ONNX, or
is the default plan's own."""

import subprocess
import sys
from pathlib import Path

from baffle.export import export_plan
from tests.support.environments import without

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from pathlib import Path
from baffle.aggregation.client import session
from baffle.journal.audit import verify
from baffle.network.member.equipment import with_onnx
from baffle.network.member.member import Member
from baffle.network.server.serve import serve
from baffle.plan import load
from baffle.runtime.onnx.model_folder import read_exported
from baffle.simulation import resume, simulate
from tests.support.lines_in_memory import LinesInMemory, new_keys

session.KEYS_AT_ONCE = 8
plan_file, model, folder = map(Path, sys.argv[1:])
plan = load(str(plan_file), ['task.model={name="onnx"}', f"run.model={model}", 'secure.mode="on"', "rounds=2"])

assert simulate(plan, folder / "simulated")["rounds"] == 2
assert resume(folder / "simulated", ["rounds=3"])["rounds"] == 3

keys = new_keys(folder, 3)
members = [
    Member(key, folder / f"state-{key.number}",
           with_onnx(key.number, None, model, part=True, approved=[read_exported(model).sha256]))
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
from baffle.network.member.equipment import with_onnx, with_plan
from baffle.network.member.member import Member
from baffle.network.server.serve import serve
from baffle.plan import load
from baffle.simulation import repeat
from baffle.simulation import resume, simulate
from tests.support.lines_in_memory import LinesInMemory, new_keys

folder = Path(sys.argv[1])
simulated = simulate(load("digits", ["rounds=2"]), folder / "simulated")
assert 0 < simulated["test_accuracy"] < 1
assert resume(folder / "simulated", ["rounds=3"])["rounds"] == 3
export_run(folder / "simulated", folder / "model")

few = ["rounds=2", "federation.clients=4"]
plan = load("digits", few)
export_plan("digits", folder / "untrained", few)
keys = new_keys(folder, 4)
equip = {number: with_plan(number, None, part=True) for number in range(4)}
equip[3] = with_onnx(3, None, folder / "untrained", part=True)
members = [
    Member(key, folder / f"state-{key.number}", equip[key.number])
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


def run_without(blocked: tuple[str, ...], program: str, *arguments: Path) -> None:
    """Run a program in a process that cannot import these packages. It must print "done" and nothing else."""
    command = [sys.executable, "-c", without(*blocked) + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_the_default_plan_needs_neither_pytorch_nor_onnx_nor_scikit_learn(tmp_path: Path) -> None:
    run_without(
        ("torch", "onnx", "onnxscript", "sklearn", "scipy", "flwr", "matplotlib", "PIL"), DEFAULT_PLAN, tmp_path
    )


def test_a_simulation_and_a_server_of_an_onnx_plan_need_no_pytorch(tiny_toml: Path, tmp_path: Path) -> None:
    export_plan(str(tiny_toml), tmp_path / "model", ["task.init=numpy"])
    run_without(("torch", "onnx", "onnxscript", "flwr"), PROGRAM, tiny_toml, tmp_path / "model", tmp_path)


FOREIGN = ("flwr", "google", "httpx", "http.client", "asyncio", "torch", "onnx", "rich", "cryptography.x509")

EDGE = f"""
import baffle.cli.main, baffle.cli.join, baffle.cli.log
import baffle.network.keys.folders, baffle.network.link.client
import baffle.network.member.edge, baffle.network.member.equipment, baffle.network.member.member, baffle.plan
assert {{"onnxruntime", "websockets"}} <= set(sys.modules)
assert set(sys.modules).isdisjoint({FOREIGN}), set(sys.modules) & set({FOREIGN})
print("done")
"""


def test_a_client_on_the_edge_loads_nothing_that_it_does_not_need() -> None:
    """All of `baffle join --model` over the link, and nothing of Flower or PyTorch."""
    run_without((), EDGE)
