"""A server that hands out the model learns no sample by it: a client runs the graph that the plan names, or one whose
bytes its owner has approved.

The folder in these tests is what a server's operator gives to clients for `baffle join --model`.
"""

import json
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from shutil import copytree

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from baffle.core.ports import Batch
from baffle.core.ring import add
from baffle.errors import ModelError
from baffle.export import export_plan
from baffle.files import read_file
from baffle.network.member.equipment import Equip, with_onnx
from baffle.plan import Plan, change
from baffle.runtime.onnx import model_folder
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import MANIFEST, MODEL, WEIGHTS, Manifest
from tests.attacks.conftest import CLIENTS
from tests.attacks.hostile_server import HostileServer, Victims, keys_of, refused

VICTIM = 2
PIXELS = 64

BRIGHT = 16.0  # few samples of digits have pixels that add up to more

FIXED = (
    "federation.clients=5",
    "federation.batch=8",
    "federation.weighting=uniform",
    "rounds=6",
    "secure.mode=malicious-server",
    "task.init=numpy",
)


def value(name: str, kind: int, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def revealing(gate: list[onnx.NodeProto], *numbers: onnx.TensorProto) -> onnx.ModelProto:
    """A graph with the inputs and outputs of a softmax regression on digits, whose loss is the product of the first 64
    weights with the pixels of those samples whose `gate` is 1: its gradient is pixels."""
    places = [
        helper.make_tensor(name, TensorProto.INT64, (1,), [place]) for place, name in enumerate(("first", "second"))
    ]
    nodes = [
        helper.make_node("Flatten", ["x"], ["pixels"]),
        *gate,
        helper.make_node("Gather", ["weight/1.weight", "first"], ["row"], axis=0),
        helper.make_node("Mul", ["pixels", "row"], ["products"]),
        helper.make_node("ReduceSum", ["products", "second"], ["sums"], keepdims=1),
        helper.make_node("Mul", ["sums", "gate"], ["gated"]),
        helper.make_node("ReduceMean", ["gated"], ["mean"], keepdims=0),
        helper.make_node("Cast", ["mean"], ["loss"], to=TensorProto.DOUBLE),
        helper.make_node("Gemm", ["pixels", "weight/1.weight", "weight/1.bias"], ["logits"], transB=1),
    ]
    inputs = [value("x", TensorProto.FLOAT, "n", 1, 8, 8), value("y", TensorProto.INT64, "n")]
    inputs += [value("weight/1.weight", TensorProto.FLOAT, 10, 64), value("weight/1.bias", TensorProto.FLOAT, 10)]
    outputs = [value("loss", TensorProto.DOUBLE), value("logits", TensorProto.FLOAT, "n", 10)]
    graph = helper.make_graph(nodes, "model", inputs, outputs, [*places, *numbers])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def brighter_than(threshold: float) -> onnx.ModelProto:
    """Open for samples whose pixels add up to more than this."""
    gate = [
        helper.make_node("ReduceSum", ["pixels", "second"], ["brightness"], keepdims=1),
        helper.make_node("Greater", ["brightness", "threshold"], ["open"]),
        helper.make_node("Cast", ["open"], ["gate"], to=TensorProto.FLOAT),
    ]
    return revealing(gate, helper.make_tensor("threshold", TensorProto.FLOAT, (), [threshold]))


def hand_out(honest: Path, out: Path, graph: onnx.ModelProto, **manifest: object) -> Path:
    """The honest folder with another graph, and a manifest that says so."""
    copytree(honest, out, dirs_exist_ok=True)
    (out / MODEL).write_bytes(graph.SerializeToString())
    described = json.loads((out / MANIFEST).read_text()) | {
        "model_sha256": sha256(graph.SerializeToString()).hexdigest()
    }
    (out / MANIFEST).write_text(json.dumps(described | manifest))
    return out


def switched() -> onnx.ModelProto:
    """Open where the file `switch` beside the graph holds a 1."""
    switch = TensorProto(name="switch", data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    switch.external_data.add(key="location", value="switch")
    return revealing([helper.make_node("Identity", ["switch"], ["gate"])], switch)


@pytest.fixture
def plan(tiny: Callable[..., Plan]) -> Plan:
    return tiny(*FIXED)


@pytest.fixture
def honest(tiny_toml: Path, tmp_path: Path) -> Path:
    export_plan(str(tiny_toml), tmp_path / "honest", FIXED)
    return tmp_path / "honest"


def attack(folder: Path, plan: Plan, equip: Callable[[int], Equip]) -> HostileServer:
    """A server whose clients have pinned the plan, and joined with the folders that they were given."""
    return HostileServer(Victims(folder, keys_of(folder, CLIENTS), plan, equip=equip))


def test_a_folder_that_names_no_model_fits_no_plan(tmp_path: Path, plan: Plan, honest: Path) -> None:
    """N4: a manifest without an architecture was taken for any pinned plan's."""
    model = hand_out(honest, tmp_path / "model", brighter_than(BRIGHT), architecture="")
    server = attack(tmp_path, plan, partial(with_onnx, data=None, model=model, part=True))
    with refused(server, 0, "was exported for another plan"):
        server.begin()


def test_a_gated_graph_shows_no_pixels(tmp_path: Path, plan: Plan, honest: Path) -> None:
    """N4: the manifest claims to be of the plan. A client makes the graph of a model that the plan describes itself,
    so what it sends is what a client with the honest folder would send, bit for bit."""
    model = hand_out(honest, tmp_path / "model", brighter_than(BRIGHT))
    server = attack(tmp_path, plan, partial(with_onnx, data=None, model=model, part=True))
    view = server.begin()
    total = server.play(view)
    server.victims.equip = partial(with_onnx, data=None, model=honest, part=True)
    own = [server.own_vector(client, view, 0, view.present.state.weights) for client in range(CLIENTS)]
    assert np.array_equal(total.astype(np.uint32), add(own))
    loss = OnnxLoss.in_folder(model)  # the graph does what it is meant to do, where it runs
    pixels, labels = np.full((1, 1, 8, 8), BRIGHT, np.float32), np.zeros(1, np.int64)
    assert loss.on(Batch(pixels, labels))(np.ones(650, np.float32)) == PIXELS * BRIGHT


NOUGHT = "0" * 64
HARMLESS: dict[str, object] = {
    "weights": [{"name": "1.bias", "shape": [10]}, {"name": "1.weight", "shape": [10, 64]}],
    "inputs": [{"name": "x", "shape": [64]}],
    **{"input_shape": [64], "input_dtype": "int64", "classes": 5, "label_shape": [2], "loss": "mse", "opset": 13},
    **{"rounds": 7, "weights_sha256": NOUGHT, "trajectory": NOUGHT, "outer": {"sha256": NOUGHT}},
    **{"head": {"weight": "1.bias"}, "instead_of": NOUGHT},
}
REFUSED: dict[str, object] = {
    **{
        "format": "baffle/model/2",
        "n_weights": 651,
        "dtype": "float64",
        "model_sha256": NOUGHT,
        "architecture": NOUGHT,
    },
}
"""Another value for each field of a manifest."""


@pytest.mark.parametrize("name", Manifest.__struct_fields__)
def test_no_field_of_a_manifest_changes_what_a_model_of_baffles_own_computes(
    tmp_path: Path, plan: Plan, honest: Path, name: str
) -> None:
    """N4: changed by the server after the owner pinned the plan. A new field must be added to one of the tables."""
    resolved = HostileServer(Victims(tmp_path, keys_of(tmp_path, CLIENTS), plan)).plan
    graph = onnx.load(honest / MODEL)
    folder = hand_out(honest, tmp_path / "model", graph, **{name: (HARMLESS | REFUSED)[name]})
    if name in REFUSED:
        with pytest.raises(ModelError):
            with_onnx(VICTIM, None, folder, part=True)(resolved)
        return
    given, own = (with_onnx(VICTIM, None, model, part=True)(resolved) for model in (folder, honest))
    assert np.array_equal(given.initial(), own.initial())
    assert np.array_equal(given.worker.vector(0, own.initial()), own.worker.vector(0, own.initial()))


def test_a_graph_that_is_none_of_baffles_own_needs_its_owners_approval(
    tmp_path: Path, tiny: Callable[..., Plan], honest: Path
) -> None:
    """N4 where the plan names a graph: that it is pinned does not say that anybody has read it."""
    model = hand_out(honest, tmp_path / "model", brighter_than(BRIGHT))
    plan, hand = named(tiny, model), partial(with_onnx, data=None, model=model, part=True)
    server = attack(tmp_path, plan, hand)
    sha = sha256((model / MANIFEST).read_bytes()).hexdigest()
    with refused(server, 0, "this client's owner has not approved it"):
        server.begin()
    assert any(sha in line for line in server.victims.logs[0])
    server.victims.equip = partial(hand, approved=[sha])
    for number in range(CLIENTS):
        server.victims.start(number)
    assert server.decoded(server.play(server.begin()), CLIENTS).contributors == CLIENTS


@pytest.mark.parametrize("file", [MODEL, MANIFEST, WEIGHTS])
def test_an_approval_covers_graph_manifest_and_weights(
    tmp_path: Path, tiny: Callable[..., Plan], honest: Path, file: str
) -> None:
    """N4: what was changed after the approval is refused."""
    model = hand_out(honest, tmp_path / "model", brighter_than(BRIGHT))
    plan, sha = named(tiny, model), sha256((model / MANIFEST).read_bytes()).hexdigest()
    server = attack(tmp_path, plan, partial(with_onnx, data=None, model=model, part=True, approved=[sha]))
    before = (model / file).read_bytes()
    after, words = {
        MODEL: (brighter_than(BRIGHT + 1).SerializeToString(), "is not the graph that"),
        MANIFEST: (before + b" ", "has not approved it"),
        WEIGHTS: (before[:-4] + np.float32(9).tobytes(), "does not hold the weights that"),
    }[file]
    (model / file).write_bytes(after)
    with refused(server, 0, words):
        server.begin()


def test_a_graph_that_is_swapped_once_it_was_read_does_not_run(
    tmp_path: Path, tiny: Callable[..., Plan], honest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N6: the bytes that were hashed are those that run. Nothing reads the file again."""

    def read_and_swap(path: Path, most: int) -> bytes:
        data = read_file(path, most)
        if path.name == MODEL:
            path.write_bytes(brighter_than(BRIGHT).SerializeToString())
        return data

    sha = sha256((honest / MANIFEST).read_bytes()).hexdigest()
    plan = HostileServer(Victims(tmp_path, keys_of(tmp_path, CLIENTS), named(tiny, honest))).plan
    equip = with_onnx(VICTIM, None, honest, part=True, approved=[sha])
    before = equip(plan)
    weights = before.initial()
    monkeypatch.setattr(model_folder, "read_file", read_and_swap)
    assert np.array_equal(equip(plan).worker.vector(0, weights), before.worker.vector(0, weights))
    with pytest.raises(ModelError, match="is not the graph that"):
        equip(plan)


def test_one_hash_is_one_model(tmp_path: Path, tiny: Callable[..., Plan], honest: Path) -> None:
    """N6: numbers beside the graph, which no hash covers, would let the victim's loss alone count in the sum. They are
    refused even if the owner has approved the rest."""
    models = {number: hand_out(honest, tmp_path / f"model-{number}", switched()) for number in range(CLIENTS)}
    for number, model in models.items():
        (model / "switch").write_bytes(np.float32(number == VICTIM).tobytes())
    sha = sha256((models[0] / MANIFEST).read_bytes()).hexdigest()
    graph = sha256((models[0] / MODEL).read_bytes()).hexdigest()
    server = attack(tmp_path, named(tiny, honest), lambda n: with_onnx(n, None, models[n], part=True, approved=[sha]))
    server.plan = change(server.plan, [f"task.model.graph={graph}"])
    with refused(server, 0, "takes numbers from other files"):
        server.begin()


def named(tiny: Callable[..., Plan], model: Path) -> Plan:
    """A plan whose model came as ONNX."""
    return tiny(*FIXED, 'task.model={name="onnx"}', f'run.model="{model}"')
