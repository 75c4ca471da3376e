"""Clients on ONNX Runtime: their models are exported from plans and runs, they need no PyTorch, and they take part in
the same rounds as clients that have it."""

import json
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from baffle.client.worker import Worker
from baffle.core.messages import Group, Outcome
from baffle.core.state import apply
from baffle.errors import ModelError, PlanError, RefusalError
from baffle.export import export_plan, export_run
from baffle.journal.audit import verify
from baffle.journal.replay import catch_up, lineage_of
from baffle.journal.store import Journal
from baffle.network.member.edge import edge_equipment
from baffle.network.member.equipment import with_onnx
from baffle.plan import Plan, change, load
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import (
    AVERAGE,
    MANIFEST,
    MODEL,
    PLAN,
    WEIGHTS,
    read_exported,
    read_manifest,
    read_weights,
)
from baffle.task.load import Task, load_task
from tests.support import tokens
from tests.support.rounds_by_hand import RoundsByHand


@pytest.fixture(scope="module")
def exported(tiny_toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny plan's model, exported with secure sums on."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_plan(str(tiny_toml), folder, ['secure.mode="on"'])
    return folder


@pytest.fixture
def plan(exported: Path) -> Plan:
    return load(str(exported / PLAN))


def test_a_plan_is_exported_with_its_initial_weights(exported: Path, plan: Plan) -> None:
    task, manifest = load_task(plan), read_manifest(exported)
    np.testing.assert_array_equal(read_weights(exported / WEIGHTS, manifest), task.initial_weights())
    assert manifest.trajectory == plan.trajectory_digest().hex()
    assert manifest.architecture == plan.model_digest().hex()
    assert (manifest.rounds, manifest.input_shape, manifest.classes) == (0, (1, 8, 8), 10)
    assert sorted(file.name for file in exported.iterdir()) == sorted([MODEL, WEIGHTS, MANIFEST, PLAN])


def test_a_run_is_exported_with_present_and_average_weights(finished_run: Path, exported: Path, tmp_path: Path) -> None:
    manifest = export_run(finished_run, tmp_path / "model")
    verified = verify(finished_run)
    assert (manifest.weights_sha256, manifest.rounds) == (verified.weights_sha256, verified.rounds)
    assert manifest.model_sha256 == read_manifest(exported).model_sha256
    with Journal.open(finished_run / "journal.sqlite") as journal:
        lineage = lineage_of(journal, journal.plan())
        trajectory, state = lineage.trajectory, catch_up(journal, lineage).state
    np.testing.assert_array_equal(read_weights(tmp_path / "model" / WEIGHTS, manifest), state.weights)
    average = read_weights(tmp_path / "model" / AVERAGE, manifest)
    np.testing.assert_array_equal(average, trajectory.rule.smooth_weights(state))


def test_a_folder_with_more_weights_than_the_policy_allows_is_not_loaded(
    exported: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N11: its manifest and the plan say how many there are, before any graph is made."""
    weights = read_manifest(exported).n_weights
    equip = with_onnx(0, None, exported, part=True)
    assert equip(plan, weights).worker.trajectory.n == weights
    monkeypatch.setattr("baffle.network.member.edge._approved", None)
    with pytest.raises(RefusalError, match=f"a model of {weights:,} weights"):
        equip(plan, weights - 1)


def test_a_folder_that_claims_few_weights_hides_no_large_model(
    exported: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N11: a client makes BAFFLE's own models by the plan, whatever the folder's manifest says."""
    folder = Path(shutil.copytree(exported, tmp_path / "model"))
    large, weights = change(plan, ['task.model={name="lenet", channels=[99, 99]}']), read_manifest(exported).n_weights
    manifest = json.loads((exported / MANIFEST).read_text()) | {"architecture": large.model_digest().hex()}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr("baffle.network.member.edge.built_in", None)
    with pytest.raises(RefusalError, match="most_weights allows at most"):
        with_onnx(0, None, folder, part=True)(large, weights)


def test_torch_and_onnx_clients_sum_securely_in_one_round(exported: Path, plan: Plan, tmp_path: Path) -> None:
    rounds = RoundsByHand(change(plan, ["run.runtime=torch"]), tmp_path / "run")
    for number in range(2):
        edge = edge_equipment(plan, exported, number, part=True).worker
        rounds.clients[number] = replace(rounds.clients[number], worker=edge)
    losses = set[float]()
    for _ in range(5):
        played = rounds.play()
        assert set(played.participation.values()) == {"contributed"}
        losses.add(played.metrics["loss"])
    rounds.journal.close()
    assert verify(tmp_path / "run").weights_sha256 == rounds.present.state.weights_hash().hex()
    assert len(losses) == 5


def test_an_edge_client_has_the_samples_and_the_loss_of_its_torch_twin(exported: Path, plan: Plan) -> None:
    """The losses agree up to rounding."""
    task = load_task(plan)
    edge, share = edge_equipment(plan, exported, 1, part=True).worker, task.shares[1]
    own, whole = edge.data.batch(edge.indices), task.source.train.batch(share)
    np.testing.assert_array_equal(own.x, whole.x)
    np.testing.assert_array_equal(own.y, whole.y)
    weights = task.initial_weights()
    runtime = OnnxLoss.in_folder(exported, micro_batch=4)
    assert runtime.on(own)(weights) == pytest.approx(task.runtime().on(whole)(weights), abs=1e-6)
    assert len(edge_equipment(plan, exported, 1).worker.indices) == len(task.source.train)


def twin_of(edge: Worker, task: Task) -> Worker:
    """The same client on the plan's own model."""
    runtime = task.runtime()
    return replace(edge, data=task.source.train, indices=task.shares[edge.number], borrow=lambda: nullcontext(runtime))


@pytest.mark.parametrize(("runtime", "distribution"), [("torch", "outer"), ("onnx", "gaussian"), ("onnx", "outer")])
def test_an_edge_client_moves_single_layers_like_its_twin(tmp_path: Path, runtime: str, distribution: str) -> None:
    """Their scalars agree up to rounding."""
    settings = [f"run.runtime={runtime}", "probe.supports=layers", "probe.k=9", "federation.clients=3"]
    settings += [f"probe.distribution={distribution}"]
    export_plan("digits", tmp_path / "model", settings)
    plan = load(str(tmp_path / "model" / PLAN))
    assert len(plan.probe.layout) == 3
    assert plan.probe.together == (0 if distribution == "gaussian" else 9 if runtime == "torch" else 1)
    task = load_task(plan)
    edge = edge_equipment(plan, tmp_path / "model", 1, part=True).worker
    whole = twin_of(edge, task)
    weights = task.initial_weights()
    scale = edge.trajectory.ring.scale * edge.trajectory.weight_of(len(edge.indices))
    scalars, same = (worker.vector(0, weights)[:9].view(np.int32) / scale for worker in (edge, whole))
    assert np.abs(scalars).max() > 0.1
    np.testing.assert_allclose(scalars, same, atol=5e-3)


def test_an_edge_client_takes_several_steps_like_its_twin(tmp_path: Path) -> None:
    settings = ["run.runtime=onnx", "probe.k=9", "probe.head=exact", "federation.clients=3", "federation.warm_up=1"]
    export_plan("digits", tmp_path / "model", [*settings, "federation.local_steps=3"])
    plan = load(str(tmp_path / "model" / PLAN))
    task = load_task(plan)
    edge = edge_equipment(plan, tmp_path / "model", 1, part=True).worker
    trajectory = edge.trajectory
    whole = twin_of(edge, task)
    state = trajectory.rule.start(task.initial_weights())
    first = trajectory.ring.decode(whole.vector(0, state.weights), 1)
    group = Group(0, first.totals.astype("<i4").tobytes(), first.weight)
    state = apply(trajectory.rule, state, Outcome(0, "scalars", (group,)))
    found = [trajectory.ring.decode(each.vector(1, state.weights, state.optimizer), 1) for each in (edge, whole)]
    for step in range(3):
        (scalars, head), (same, same_head) = (
            trajectory.means(trajectory.of_step(total.totals, step), total.weight) for total in found
        )
        assert np.abs(scalars).max() > 0.1
        np.testing.assert_allclose(scalars, same, atol=2e-2)
        np.testing.assert_allclose(head, same_head, atol=1e-4)


def test_the_graph_for_shared_passes_of_version_0_2_is_ignored(exported: Path, plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    copytree(exported, folder)
    (folder / "outer.onnx").write_bytes(b"a graph")
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["outer"] is None
    (folder / MANIFEST).write_text(json.dumps(manifest | {"outer": {"sha256": "0" * 64, "row_bytes": 9}}))
    weights = load_task(plan).initial_weights()
    old, new = (edge_equipment(plan, each, 1, part=True).worker.vector(0, weights) for each in (folder, exported))
    np.testing.assert_array_equal(old, new)


def test_token_ids_reach_an_edge_client_unrounded(tiny_toml: Path, tmp_path: Path) -> None:
    """Its loss is that of a client on PyTorch in float32, whatever the plan's precision."""
    settings = [
        f'task.data="{tokens.__name__}:data"',
        f'task.model={{name="custom", factory="{tokens.__name__}:model"}}',
        'probe.precision="bfloat16"',
    ]
    assert export_plan(str(tiny_toml), tmp_path / "model", settings).input_dtype == "int64"
    plan, approved = load(str(tmp_path / "model" / PLAN)), [read_exported(tmp_path / "model").sha256]
    task = load_task(plan)
    worker = edge_equipment(plan, tmp_path / "model", 1, part=True, approved=approved).worker
    batch = worker.data.batch(worker.indices)
    np.testing.assert_array_equal(batch.x, task.source.train.batch(task.shares[1]).x)
    assert set(batch.x.flatten().tolist()) == set(tokens.ROUNDED)
    weights = task.initial_weights()
    with worker.borrow() as runtime:
        loss = runtime.on(batch)(weights)
    assert loss == pytest.approx(task.runtime("float32").on(batch)(weights), abs=1e-6)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('task.model={name="lenet"}', "exported for another plan"),
        ('estimator="backprop"', "only run inference"),
        ("probe.micro_batch=0", "not resolved"),
        ("federation.clients=1", "from 0 to"),
    ],
)
def test_what_does_not_fit_is_refused(exported: Path, plan: Plan, setting: str, says: str) -> None:
    off = ['secure.mode="off"'] if "clients" in setting else []
    with pytest.raises((ModelError, PlanError), match=says):
        edge_equipment(change(plan, [*off, setting]), exported, 1)


def test_shapes_that_are_not_those_of_its_graph_are_refused(tiny_toml: Path, tmp_path: Path) -> None:
    export_plan(str(tiny_toml), tmp_path / "model", ["probe.distribution=outer"])
    plan = load(str(tmp_path / "model" / PLAN))
    assert plan.probe.shapes == ((10, 64), (10,))
    assert edge_equipment(plan, tmp_path / "model", 1).worker.k == 4
    words = r"probe\.shapes are not those .* \[\[10, 64\], \[10\]\], got \[\[20, 32\], \[10\]\]"
    with pytest.raises(PlanError, match=words):
        edge_equipment(change(plan, ["probe.shapes=[[20, 32], [10]]"]), tmp_path / "model", 1)


@pytest.mark.parametrize("setting", ["probe.sigma=1e-2", "federation.clients=7"])
def test_a_model_serves_every_plan_that_has_it(exported: Path, plan: Plan, setting: str) -> None:
    """A server settles parts of a plan when it knows its clients, long after the export."""
    other = change(plan, [setting])
    assert (
        edge_equipment(other, exported, 1).worker.trajectory.digest
        == other.trajectory_digest()
        != plan.trajectory_digest()
    )


def test_the_command_exports_and_refuses_in_one_line(
    cli: Callable[..., subprocess.CompletedProcess[str]], tiny_toml: Path, tmp_path: Path
) -> None:
    done = cli("export", tiny_toml, "--out", tmp_path / "model", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["n_weights"] == 650
    for arguments, says in (
        ([tiny_toml, "--out", tmp_path / "model"], "not an empty folder"),
        (["--out", tmp_path / "new"], "expected one thing to export"),
        ([tiny_toml, "--onnx", "file", "--out", tmp_path / "new"], "expected one thing to export"),
        (
            [tiny_toml, "--freeze", "a", "--out", tmp_path / "new"],
            "--freeze, --loss, --shape, --head, --train, --beside and --output belong",
        ),
        (
            [tiny_toml, "--shape", "3", "--out", tmp_path / "new"],
            "--freeze, --loss, --shape, --head, --train, --beside and --output belong",
        ),
        (
            [tiny_toml, "--loss", "mse", "--out", tmp_path / "new"],
            "--freeze, --loss, --shape, --head, --train, --beside and --output belong",
        ),
        (["--onnx", "file", "--shape", "a", "--out", tmp_path / "new"], "--shape: expected the sizes of one sample"),
        (["--onnx", tmp_path / "none.onnx", "--out", tmp_path / "new"], "cannot be read as an ONNX model"),
    ):
        done = cli("export", *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert says in done.stderr
