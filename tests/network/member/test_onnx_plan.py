"""A plan whose model came as ONNX: it is simulated, served, resumed and exported again, and what it cannot do is
refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession

from baffle.core.messages import first_number, tag_of
from baffle.data.sources import load as load_data
from baffle.errors import ModelError, PlanError
from baffle.export import export_beside, export_onnx, export_plain, export_run
from baffle.journal.audit import verify
from baffle.measuring.costs import costs
from baffle.network.member.edge import edge_equipment
from baffle.network.member.equipment import with_onnx, with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.server.serve import serve
from baffle.network.settling import differences
from baffle.plan import Onnx, Plan, change, load
from baffle.runtime.onnx.model_folder import WEIGHTS, read_exported, read_manifest, read_weights
from baffle.simulation import repeat, resume, simulate
from baffle.task.load import load_task
from tests.support import tokens
from tests.support.int8_nets import int8
from tests.support.lines_in_memory import Federation, LinesInMemory, new_keys

ONNX = 'task.model={name="onnx"}'


def _foreign(path: Path, pixels: int = 8, seed: int = 0) -> None:
    """Save a classifier of digits as another tool would make it: a layer with ReLU, then a linear one."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((pixels**2, 12)).astype(np.float32) * np.float32(0.125)
    last = random.standard_normal((12, 10)).astype(np.float32) * np.float32(0.25)

    def tensor(name: str, values: NDArray[Any]) -> onnx.TensorProto:
        return numpy_helper.from_array(values, name)

    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["image"], ["flat"]),
            helper.make_node("Gemm", ["flat", "hidden", "bias"], ["before"]),
            helper.make_node("Relu", ["before"], ["after"]),
            helper.make_node("MatMul", ["after", "last"], ["scores"]),
        ],
        "theirs",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 1, pixels, pixels])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 10])],
        [tensor("hidden", hidden), tensor("bias", np.zeros(12, np.float32)), tensor("last", last)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    _foreign(folder / "theirs.onnx")
    export_onnx(folder / "theirs.onnx", folder / "model")
    return folder / "model"


@pytest.fixture
def plan(tiny: Callable[..., Plan], model: Path) -> Callable[..., Plan]:
    return lambda *settings: tiny(ONNX, f'run.model="{model}"', "secure.mode=on", *settings)


def test_it_starts_with_its_own_weights_and_learns(plan: Callable[..., Plan], model: Path, tmp_path: Path) -> None:
    manifest = read_manifest(model)
    chosen = plan("rounds=40", "probe.k=20", "update.rate=0.03")
    weights = load_task(chosen).initial_weights()
    np.testing.assert_array_equal(weights, read_weights(model / WEIGHTS, manifest))
    summary = simulate(chosen, tmp_path / "run")
    assert summary["n_weights"] == manifest.n_weights == 64 * 12 + 12 + 120
    assert summary["test_accuracy"] > 0.4
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_its_layers_are_the_nodes_that_use_its_weights(plan: Callable[..., Plan], tmp_path: Path) -> None:
    chosen = plan("probe.supports=layers", "probe.k=9", "rounds=3")
    summary = simulate(chosen, tmp_path / "run")
    stored = load(str(tmp_path / "run" / "plan.toml"))
    assert [row[:4] for row in stored.probe.layout] == [(0, 780, 0, 0), (780, 900, 0, 0)]
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_one_of_token_ids_with_open_sizes_is_trained(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    tokens.write_graph(tmp_path / "theirs.onnx", "n", "length")
    export_onnx(tmp_path / "theirs.onnx", tmp_path / "model", shape=(tokens.LENGTH,))
    data = f'task.data="{tokens.__name__}:data"'
    chosen = tiny(ONNX, f'run.model="{tmp_path / "model"}"', data, "probe.supports=layers")
    summary = simulate(chosen, tmp_path / "run")
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_a_run_names_its_graph_and_takes_no_other(plan: Callable[..., Plan], model: Path, tmp_path: Path) -> None:
    whole = simulate(plan("rounds=6"), tmp_path / "whole")
    simulate(plan("rounds=3"), tmp_path / "run")
    stored = load(str(tmp_path / "run" / "plan.toml"))
    assert stored.task.model == Onnx(graph=read_manifest(model).model_sha256)
    _foreign(tmp_path / "other.onnx", seed=1)
    graph = onnx.load(tmp_path / "other.onnx")
    graph.graph.node[2].op_type = "Tanh"
    onnx.save(graph, tmp_path / "other.onnx")
    export_onnx(tmp_path / "other.onnx", tmp_path / "other")
    toml = tmp_path / "run" / "plan.toml"
    text = toml.read_text().replace("rounds = 3", "rounds = 6")
    toml.write_text(text.replace(str(model), str(tmp_path / "other")))
    with pytest.raises(ModelError, match="is not the plan's"):
        resume(tmp_path / "run")
    toml.write_text(text)
    assert resume(tmp_path / "run")["weights_sha256"] == whole["weights_sha256"]


def test_a_trained_one_is_exported_with_the_same_graph(plan: Callable[..., Plan], model: Path, tmp_path: Path) -> None:
    summary = simulate(plan(), tmp_path / "run")
    manifest = export_run(tmp_path / "run", tmp_path / "trained")
    assert manifest.model_sha256 == read_manifest(model).model_sha256
    assert manifest.weights_sha256 == summary["weights_sha256"]
    sha256 = read_exported(tmp_path / "trained").sha256
    edge_equipment(load(str(tmp_path / "run" / "plan.toml")), tmp_path / "trained", 0, part=True, approved=[sha256])


def test_clients_of_a_network_need_the_folder(plan: Callable[..., Plan], model: Path, tmp_path: Path) -> None:
    keys, approved = new_keys(tmp_path, 4), [read_exported(model).sha256]

    def member(number: int) -> Member:
        equip = (
            with_onnx(number, None, model, part=True, approved=approved)
            if number < 3
            else with_plan(number, None, part=True)
        )
        return Member(keys[number], tmp_path / f"state-{number}", equip, tell=own_logs[number].append)

    told, own_logs = list[str](), [list[str]() for _ in range(4)]
    lines = LinesInMemory({number: member(number).answer for number in range(4)})
    chosen = plan("federation.clients=4", "run.deadline_seconds=3")
    summary = serve(chosen, tmp_path / "run", lines, keys[0].roster, least=3, tell=told.append, clock=lines.clock)
    assert summary["rounds"] == 6
    assert any("client 3 does not take part" in line for line in told), told
    assert any("copy its folder" in line for line in own_logs[3]), own_logs
    assert told[-1] == "3 of 4 clients hold the last weights"
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_an_exact_head_is_trained_by_edge_clients_and_repeated(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    """The graph shows the inputs of its last layer; a client leaves round 2 out, and a repetition has the same bits."""
    _foreign(tmp_path / "theirs.onnx")
    model = tmp_path / "model"
    export_onnx(tmp_path / "theirs.onnx", model, head=True)
    federation = Federation(
        new_keys(tmp_path, 4),
        tmp_path,
        tiny(
            ONNX, f'run.model="{model}"', "secure.mode=on", "federation.clients=4", "probe.head=exact", "secure.floor=2"
        ),
    )
    approved = [read_exported(model).sha256]
    members: dict[int, Callable[[bytes], bytes | None]] = {
        number: Member(
            federation.keys[number],
            tmp_path / f"client-{number}",
            with_onnx(number, None, model, part=True, approved=approved),
            policy=Policy(floor=2),
        ).answer
        for number in range(4)
    }
    silent = members[3]
    lines = LinesInMemory(members)
    lines.clients[3] = lambda data: (
        None if tag_of(data) == "masked-request" and first_number(data) == 2 else silent(data)
    )
    summary = federation.serve(lines)
    assert summary["dropouts"] == 1
    repeat(federation.run, tmp_path / "again")
    original, again = verify(federation.run), verify(tmp_path / "again")
    assert (original.weights_sha256, original.chain) == (again.weights_sha256, again.chain)
    assert load(str(federation.run / "plan.toml")).head_size == 12 * 10


def test_no_server_chooses_which_weights_are_the_head(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    """Weights of its own choice would be measured exactly in every round."""
    _foreign(tmp_path / "theirs.onnx")
    model = tmp_path / "model"
    export_onnx(tmp_path / "theirs.onnx", model, head=True)
    simulate(tiny(ONNX, f'run.model="{model}"', "rounds=1", "probe.head=exact"), tmp_path / "run")
    plan, approved = load(str(tmp_path / "run" / "plan.toml")), [read_exported(model).sha256]
    assert edge_equipment(plan, model, 0, part=True, approved=approved).worker.trajectory.plan.head_size == 120
    for place, words in (((0, 120, 0, 0), "probe.head_at is"), ((0, 0, 0, 0), "is not a part of the model")):
        with pytest.raises(PlanError, match=words):
            edge_equipment(change(plan, [f"probe.head_at={list(place)}"]), model, 0, part=True, approved=approved)


def test_a_folder_without_its_head_is_refused_for_an_exact_one(plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanError, match="the graph does not show its last linear layer"):
        load_task(plan("probe.head=exact"))


def test_a_plan_that_names_no_graph_is_the_same_as_the_run_that_does(plan: Callable[..., Plan], tmp_path: Path) -> None:
    """Such a plan is given to a server that is started again, or to a client with --plan."""
    simulate(plan("rounds=1"), tmp_path / "run")
    stored = load(str(tmp_path / "run" / "plan.toml"))
    assert differences(plan(), stored) == ""
    assert differences(plan(f'task.model.graph="{"0" * 64}"'), stored).startswith("task.model.graph is ")
    assert differences(plan("probe.sigma=0.1"), stored) == "probe.sigma is 0.001 there and 0.1 here"


def test_another_graph_is_no_clients_model(plan: Callable[..., Plan], tmp_path: Path) -> None:
    simulate(plan("rounds=1"), tmp_path / "run")
    _foreign(tmp_path / "small.onnx", pixels=4)
    export_onnx(tmp_path / "small.onnx", tmp_path / "small")
    stored = load(str(tmp_path / "run" / "plan.toml"))
    with pytest.raises(ModelError, match="another than the plan's"):
        edge_equipment(stored, tmp_path / "small", 0)
    with pytest.raises(
        ModelError, match=r"shape \(1, 4, 4\) and has 10 outputs, but digits has samples of \(1, 8, 8\)"
    ):
        load_task(plan(f'run.model="{tmp_path / "small"}"'))


def test_the_costs_of_a_run_are_known_without_pytorch(plan: Callable[..., Plan]) -> None:
    estimate = costs(load_task(plan()))
    assert estimate.n_weights == 900
    assert estimate.alignment is not None
    assert estimate.precision is not None
    assert estimate.precision.noise < 0.01


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("estimator=backprop", "estimator: a model that came as ONNX has no gradient"),
        ("probe.supports=units", 'probe.supports: .* takes "dense" or "layers", got \'units\''),
        ("probe.precision=float16", 'probe.precision: .* takes "float32"'),
        ("probe.memory_mb=9", "probe.memory_mb"),
        ("task.model.graph=abc", "task.model.graph"),
    ],
)
def test_what_onnx_runtime_cannot_do_is_refused(plan: Callable[..., Plan], setting: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(setting)


def test_a_folder_without_such_a_model_and_a_model_without_a_folder_are_refused(tiny: Callable[..., Plan]) -> None:
    with pytest.raises(PlanError, match=r'expected task\.model\.name = "onnx"'):
        tiny("run.model=somewhere")
    with pytest.raises(PlanError, match=r"run\.model: expected the folder"):
        load_task(tiny(ONNX))
    with pytest.raises(ModelError, match="nowhere holds no exported model"):
        load_task(tiny(ONNX, "run.model=nowhere"))


def test_a_client_with_integers_takes_part_beside_clients_with_floats(
    tiny: Callable[..., Plan], tmp_path: Path
) -> None:
    """The same head behind a quantised backbone: all have the same weights, and the trained file is as often right."""
    x = load_data("digits").train.batch(np.arange(300)).x
    theirs = int8(tmp_path / "theirs.onnx", "QDQ", x)
    model, integer = tmp_path / "model", tmp_path / "integer"
    export_onnx(tmp_path / "floats.onnx", model, head=True, train=["head"])
    export_beside(theirs, model, integer)
    approved = {folder: read_exported(folder).sha256 for folder in (model, integer)}
    assert len(set(approved.values())) == 2
    settings = (f'run.model="{model}"', "secure.mode=on", "federation.clients=4", "probe.head=exact", "rounds=30")
    federation = Federation(new_keys(tmp_path, 4), tmp_path, tiny(ONNX, *settings, "update.rate=0.1", "update.ema=0.5"))
    folders = {number: integer if number == 2 else model for number in range(4)}
    equipment = {
        number: with_onnx(number, None, folder, part=True, approved=[approved[folder]])
        for number, folder in folders.items()
    }
    members: dict[int, Callable[[bytes], bytes | None]] = {
        number: Member(federation.keys[number], tmp_path / f"client-{number}", equip).answer
        for number, equip in equipment.items()
    }
    summary = federation.serve(LinesInMemory(members))
    assert (summary["dropouts"], summary["rounds"]) == (0, 30)
    assert verify(federation.run).weights_sha256 == summary["weights_sha256"]
    assert summary["test_accuracy"] > 0.6  # chance is a tenth
    export_plain(federation.run, tmp_path / "trained.onnx")
    test = load_data("digits").test.batch(np.arange(len(load_data("digits").test)))
    session = InferenceSession(tmp_path / "trained.onnx", providers=["CPUExecutionProvider"])
    assert np.mean(session.run(None, {"x": test.x})[0].argmax(1) == test.y) == pytest.approx(summary["test_accuracy"])
    plan = load(str(federation.run / "plan.toml"))
    with pytest.raises(ModelError, match="has not approved it"):
        edge_equipment(plan, integer, 2, part=True, approved=[approved[model]])
    other = tmp_path / "other"
    export_onnx(theirs, other, head=True, train=["head"])
    with pytest.raises(ModelError, match="another than the plan's"):
        edge_equipment(plan, other, 2, part=True, approved=[read_exported(other).sha256])


def test_a_file_beside_a_folder_must_have_its_weights(tmp_path: Path) -> None:
    x = load_data("digits").train.batch(np.arange(300)).x
    dynamic = int8(tmp_path / "dynamic.onnx", "dynamic", x)  # its last matrix is transposed
    export_onnx(tmp_path / "floats.onnx", tmp_path / "head", train=["head"])
    with pytest.raises(ModelError, match=r"trains last of shape \(10, 16\), .* has \(16, 10\); leave the layers"):
        export_beside(dynamic, tmp_path / "head", tmp_path / "a")
    export_onnx(tmp_path / "floats.onnx", tmp_path / "all", train=["bias2"])
    with pytest.raises(ModelError, match=r"trains bias2 of shape \(16,\), .* has none of that name"):
        export_beside(int8(tmp_path / "static.onnx", "QOperator", x), tmp_path / "all", tmp_path / "a")
    export_onnx(tmp_path / "floats.onnx", tmp_path / "mse", train=["bias2"], loss="mse")
    assert export_beside(dynamic, tmp_path / "mse", tmp_path / "b").loss == "mse"
    assert not (tmp_path / "a").exists()
