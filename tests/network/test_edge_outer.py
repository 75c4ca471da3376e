"""Exported graphs for many outer directions: clients on the edge share passes, and notice a graph that is no fit."""

import json
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from baffle.client.worker import Worker
from baffle.core.arrays import F64
from baffle.core.ports import Runtime
from baffle.errors import ModelError
from baffle.export import export_onnx, export_plan, export_run
from baffle.network import connected, edge, serve
from baffle.network.edge import edge_worker
from baffle.plan import Plan, load
from baffle.repetition import repeat
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import MODEL, OUTER_MODEL, PLAN, WEIGHTS, Manifest, read_manifest, write_manifest
from baffle.runtime.onnx.outer import OnnxOuter
from baffle.simulation import resume, simulate
from baffle.task.load import load_task
from tests.support.blocked_imports import without
from tests.support.lines_in_memory import Federation, new_keys
from tests.support.onnx_nets import Net

Cli = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parent.parent.parent
K = 24
OUTER = ["probe.distribution=outer", f"probe.k={K}", "federation.clients=3", "secure.mode=off"]
LENET = 'task.model={name="lenet", channels=[3, 4], head="flatten", norm="group"}'


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outer") / "model"
    export_plan("digits", folder, [*OUTER, LENET])
    return folder


@pytest.fixture
def plan(exported: Path) -> Plan:
    return load(str(exported / PLAN))


def runtime_of(worker: Worker) -> Runtime:
    with worker.borrow() as runtime:
        return runtime


def scalars_of(worker: Worker, weights: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> F64:
    scale = worker.trajectory.ring.scale * worker.trajectory.weight_of(len(worker.indices))
    scalars: F64 = worker.vector(0, weights)[:K].view(np.int32) / scale
    return scalars


def test_a_plan_whose_directions_share_passes_is_exported_with_the_graph_for_it(exported: Path, plan: Plan) -> None:
    assert plan.probe.together == K
    outer = read_manifest(exported).outer
    assert outer is not None
    assert outer.row_bytes > 64 * 4


def copied(exported: Path, folder: Path, manifest: Manifest) -> Path:
    """An exported folder with another manifest."""
    folder.mkdir()
    for name in (MODEL, OUTER_MODEL, WEIGHTS, PLAN):
        (folder / name).write_bytes((exported / name).read_bytes())
    write_manifest(folder, manifest)
    return folder


@pytest.mark.parametrize("room", [edge.SHARED_PASS, 1 << 16])
def test_its_scalars_are_those_of_one_pass_a_direction(
    exported: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """With little memory fewer directions share a pass. A folder without the graph serves as well."""
    monkeypatch.setattr(edge, "SHARED_PASS", room)
    without_graph = copied(exported, tmp_path / "model", replace(read_manifest(exported), outer=None))
    sharing, alone = (edge_worker(plan, folder, 1, K, part=True) for folder in (exported, without_graph))
    assert isinstance(runtime_of(alone), OnnxLoss)
    shared = runtime_of(sharing)
    assert isinstance(shared, OnnxOuter)
    assert shared.together == K if room > 1 << 20 else 1 <= shared.together < K
    weights = load_task(plan).initial_weights()
    scalars = scalars_of(sharing, weights)
    assert np.abs(scalars).max() > 0.1
    np.testing.assert_allclose(scalars, scalars_of(alone, weights), atol=5e-3)


def test_a_graph_of_another_model_is_noticed(plan: Plan, exported: Path, tmp_path: Path) -> None:
    """Its weights have the same shapes, and the liar's manifest names its SHA-256."""
    other = tmp_path / "other"
    export_plan("digits", other, [*OUTER, LENET, "task.model.activation=relu"])
    liar = replace(read_manifest(exported), outer=read_manifest(other).outer)
    folder = copied(exported, tmp_path / "model", liar)
    (folder / OUTER_MODEL).write_bytes((other / OUTER_MODEL).read_bytes())
    with pytest.raises(ModelError, match=r"outer\.onnx does not fit model\.onnx: .* other outputs"):
        edge_worker(plan, folder, 1, K, part=True)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3,)])
def test_a_graph_with_other_inputs_and_outputs_is_refused(
    plan: Plan, exported: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    net = Net(*shape)
    net.saved(tmp_path / "strange.onnx", net.classify("samples", prod(shape)))
    strange = (tmp_path / "strange.onnx").read_bytes()
    manifest = read_manifest(exported)
    assert manifest.outer is not None
    liar = replace(manifest.outer, sha256=sha256(strange).hexdigest(), row_bytes=1 << 62)
    folder = copied(exported, tmp_path / "model", replace(manifest, outer=liar))
    (folder / OUTER_MODEL).write_bytes(strange)
    with pytest.raises(ModelError, match=r"ONNX Runtime .* refuses"):
        edge_worker(plan, folder, 1, K, part=True)


def test_a_damaged_graph_is_refused(plan: Plan, exported: Path, tmp_path: Path) -> None:
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / OUTER_MODEL).write_bytes(b"graph")
    with pytest.raises(ModelError, match=r"outer\.onnx is not the graph that manifest\.json describes"):
        edge_worker(plan, tmp_path, 1, K, part=True)
    (tmp_path / OUTER_MODEL).unlink()
    with pytest.raises(ModelError, match=r"outer\.onnx is not a file"):
        edge_worker(plan, tmp_path, 1, K, part=True)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A classifier of digits as another tool would make it."""
    net = Net(1, 8, 8)
    x = net.add("Relu", net.add("Conv", "samples", net.weight(3, 1, 3, 3), net.weight(3), strides=[2, 2]))
    x = net.add(
        "BatchNormalization",
        x,
        *(net.weight(3) for _ in range(2)),
        *(net.constant(np.ones(3, np.float32)) for _ in range(2)),
    )
    return net.saved(tmp_path / "theirs.onnx", net.classify(x, 27, 10))


PROGRAM = """
from pathlib import Path
from baffle.plan import load
from baffle.simulation import resume, simulate

told = []
settings = ['task.model={name="onnx"}', f'run.model="{sys.argv[1]}"', "rounds=2", *sys.argv[3:]]
simulate(load("digits", settings), Path(sys.argv[2]), warn=told.append)
print(load(str(Path(sys.argv[2]) / "plan.toml")).probe.together, *told, sep="\\n")
"""


def simulated(model: Path, run: Path, *blocked: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + without(*blocked) + PROGRAM, str(model), str(run), *OUTER],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert not done.stderr
    return done.stdout.splitlines()


def test_a_classifier_from_elsewhere_shares_passes(cli: Cli, theirs: Path, tmp_path: Path) -> None:
    """With the graph in its folder no package but ONNX Runtime is needed; without it, the package `onnx` makes one."""
    done = cli("export", "--onnx", theirs, "--outer", "--out", tmp_path / "both")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "both" / OUTER_MODEL).is_file()
    export_onnx(theirs, tmp_path / "plain")
    assert not (tmp_path / "plain" / OUTER_MODEL).exists()
    bare = ("torch", "onnx", "onnxscript", "sklearn")
    assert simulated(tmp_path / "both", tmp_path / "run", *bare)[0] == str(K)
    assert simulated(tmp_path / "plain", tmp_path / "made", "torch")[0] == str(K)
    together, *remarks = simulated(tmp_path / "plain", tmp_path / "alone", *bare)
    assert together == "1"
    assert any("has no outer.onnx; export the model again with --outer" in remark for remark in remarks)
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("run", "made", "alone")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    again = export_run(tmp_path / "run", tmp_path / "again")
    assert again.outer == read_manifest(tmp_path / "both").outer


def test_what_cannot_share_a_pass_is_refused_in_one_line_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    net = Net(3, 4)
    cells = net.add(
        "RNN", net.add("Transpose", "samples", perm=[1, 0, 2]), net.weight(1, 5, 4), net.weight(1, 5, 5), hidden_size=5
    )
    path = net.saved(
        tmp_path / "cells.onnx", net.classify(net.add("ReduceMean", cells, net.constant([0, 1]), keepdims=0), 5)
    )
    done = cli("export", "--onnx", path, "--outer", "--out", tmp_path / "model")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--outer: directions of this model cannot share a pass: weight0 is used by RNN" in done.stderr
    assert not (tmp_path / "model").exists()
    assert cli("export", "--onnx", path, "--out", tmp_path / "model").returncode == 0


def test_a_network_is_the_same_as_its_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients with the plan's own model share passes in the same blocks as the simulation, so they agree to the bit."""
    for module, name in ((serve, "LOOK"), (serve, "EPOCH_SECONDS"), (connected, "AGAIN")):
        monkeypatch.setattr(module, name, 0.001)
    plan = load("digits", [*OUTER, LENET, "secure.mode=on", "rounds=3", "probe.together=10"])
    federation = Federation(new_keys(tmp_path, 3), tmp_path, plan)
    summary = federation.serve(federation.lines(3))
    assert load(str(federation.run / "plan.toml")).probe.together == 10
    assert repeat(federation.run, tmp_path / "repeated")["weights_sha256"] == summary["weights_sha256"]


@pytest.mark.parametrize(
    "setting", ["probe.scheme=central", "probe.stacked=true", "probe.supports=layers", "federation.level=epoch"]
)
def test_the_same_bits_with_any_sums_and_threads_and_after_a_pause(tmp_path: Path, setting: str) -> None:
    settings = [*OUTER, LENET, setting, "federation.batch=4", "rounds=2"]
    plain = simulate(load("digits", [*settings, "run.workers=2"]), tmp_path / "plain")
    secure = simulate(load("digits", [*settings, "secure.mode=on", "run.workers=1"]), tmp_path / "secure")
    simulate(load("digits", [*settings, "rounds=1"]), tmp_path / "paused")
    assert load(str(tmp_path / "plain" / PLAN)).probe.together == K
    resumed = resume(tmp_path / "paused", ["rounds=2"])
    assert plain["weights_sha256"] == secure["weights_sha256"] == resumed["weights_sha256"]
