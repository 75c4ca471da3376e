"""ONNX Runtime as a runtime: its losses are those of PyTorch at any weights, batch and micro-batch size."""

import json
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from baffle.core.arrays import F32
from baffle.core.ports import Batch
from baffle.errors import ModelError
from baffle.export import export_onnx, write_export
from baffle.models.inputs import Inputs
from baffle.models.mobilenet import freeze_front, mobilenet
from baffle.models.networks import lenet, wrn
from baffle.plan import LeNet, Plan, TaskSettings
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import WEIGHTS, read_manifest, read_weights
from baffle.runtime.torch.loss import TorchLoss, weights_of
from baffle.runtime.torch.model import initial_module
from tests.support import tokens
from tests.support.onnx_nets import export_module

SMALL = (1, 8, 8)


def _batch(shape: tuple[int, ...], n: int, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    return Batch(random.random((n, *shape), np.float32), random.integers(0, 10, n))


def _moved(weights: F32, seed: int, by: float = 0.05) -> F32:
    return weights + np.random.default_rng(seed).normal(0, by, len(weights)).astype(np.float32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A small LeNet as a module and as a graph that BAFFLE built itself, which is quick."""
    settings, inputs, folder = (
        LeNet(channels=(3, 4), head="flatten"),
        Inputs(SMALL, 10),
        tmp_path_factory.mktemp("small"),
    )
    graph = built_in(settings, inputs, 0)
    write_export(folder, graph, graph.flat())
    return initial_module(Plan(task=TaskSettings(model=settings, init="numpy")), inputs), folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lenet, (1, 32, 32)),
        (wrn, (3, 32, 32)),
        (mobilenet, (3, 32, 32)),
        (lambda shape, classes: freeze_front(lenet(shape, classes, head="flatten")), SMALL),
    ],
    ids=["lenet", "wrn", "mobilenet", "the head behind a frozen front"],
)
def test_losses_are_those_of_torch(
    make: Callable[[tuple[int, ...], int], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    module = make(shape, 10)
    manifest = export_module(module, shape, tmp_path / "model")
    weights = weights_of(module)
    np.testing.assert_array_equal(read_weights(tmp_path / "model" / WEIGHTS, manifest), weights)
    ours, theirs, batch = OnnxLoss.in_folder(tmp_path / "model", micro_batch=3), TorchLoss(module), _batch(shape, 5)
    for point in (weights, _moved(weights, 0, 0.01), _moved(weights, 1, 0.02)):
        assert ours.on(batch)(point) == pytest.approx(theirs.on(batch)(point), abs=1e-5, rel=1e-5)
    np.testing.assert_allclose(ours.outputs(weights, batch), theirs.outputs(weights, batch), atol=1e-4)


@settings(max_examples=40)
@given(n=st.integers(1, 40), micro=st.integers(0, 45), seed=st.integers(0, 99), by=st.floats(0, 0.5))
def test_any_batch_micro_batch_and_point_gives_torchs_loss(
    small: tuple[nn.Module, Path], n: int, micro: int, seed: int, by: float
) -> None:
    """Other batches and weights on the same runtime change nothing."""
    module, folder = small
    batch, point = _batch(SMALL, n, seed), _moved(weights_of(module), seed, by)
    runtime = OnnxLoss.in_folder(folder, micro_batch=micro)
    loss, other = runtime.on(batch), runtime.on(_batch(SMALL, 9, seed + 1))
    first = loss(point)
    assert first == pytest.approx(TorchLoss(deepcopy(module)).on(batch)(point), abs=1e-5, rel=1e-5)
    other(_moved(point, 2))
    assert loss(point) == first


@pytest.mark.slow
def test_the_same_module_is_exported_with_the_same_bytes(small: tuple[nn.Module, Path], tmp_path: Path) -> None:
    for name in ("one", "other"):
        export_module(small[0], SMALL, tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    module, folder = tokens.model(), tmp_path_factory.mktemp("embedding") / "model"
    export_module(module, (tokens.LENGTH,), folder, "int64")
    return module, folder


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16])
def test_token_ids_give_torchs_loss(embedding: tuple[nn.Module, Path], dtype: type) -> None:
    module, folder = embedding
    ids = tokens.tokens(6)
    labels = np.arange(6) % tokens.CLASSES
    ours = OnnxLoss.in_folder(folder, micro_batch=4).on(Batch(ids.astype(dtype), labels))
    theirs = TorchLoss(deepcopy(module)).on(Batch(ids, labels))
    for weights in (weights_of(module), _moved(weights_of(module), 0, 0.3)):
        assert ours(weights) == pytest.approx(theirs(weights), abs=1e-6)


def test_other_samples_are_refused(embedding: tuple[nn.Module, Path], small: tuple[nn.Module, Path]) -> None:
    ids = Batch(tokens.tokens(2), np.zeros(2, np.int64))
    with pytest.raises(ModelError, match=r"samples of shape \(1, 8, 8\), got float32 of shape \(1, 9, 9\)"):
        OnnxLoss.in_folder(small[1]).on(_batch((1, 9, 9), 2))
    with pytest.raises(ModelError, match="takes int64 samples, got float32"):
        OnnxLoss.in_folder(embedding[1]).on(Batch(ids.x.astype(np.float32), ids.y))
    with pytest.raises(ModelError, match="takes float32 samples, got int64"):
        OnnxLoss.in_folder(small[1]).on(Batch(np.zeros((2, *SMALL), np.int64), ids.y))


def test_a_manifest_without_an_input_type_is_one_of_floats(small: tuple[nn.Module, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small[1], tmp_path / "model"))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest.pop("input_dtype") == "float32"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert read_manifest(folder).input_dtype == "float32"
    assert np.isfinite(OnnxLoss.in_folder(folder).on(_batch(SMALL, 2))(weights_of(small[0])))


@pytest.mark.parametrize(
    ("kind", "name", "length"), [(TensorProto.INT64, "int64", "open"), (TensorProto.INT32, "int32", 3)]
)
def test_a_foreign_classifier_of_integers_is_taken(tmp_path: Path, kind: int, name: str, length: str | int) -> None:
    """Also one that leaves the length of a sample open, if it is told."""
    tokens.write_graph(tmp_path / "their.onnx", "n", length, kind=kind)
    manifest = export_onnx(tmp_path / "their.onnx", tmp_path / "model", shape=(3,) if length == "open" else ())
    assert (manifest.input_dtype, manifest.input_shape, manifest.classes) == (name, (3,), 4)
    ids = np.array([tokens.ROUNDED])
    weights = read_weights(tmp_path / "model" / WEIGHTS, manifest)
    table = weights.reshape(1000, 4)
    logits = OnnxLoss.in_folder(tmp_path / "model").outputs(weights, Batch(ids, np.zeros(1, np.int64)))
    np.testing.assert_allclose(logits, table[ids].mean(1), atol=1e-6)
    if name == "int32":
        with pytest.raises(ModelError, match="takes int32 samples, got int64"):
            OnnxLoss.in_folder(tmp_path / "model").on(Batch(ids + 2**32, np.zeros(1, np.int64)))


OPEN = "leaves the size of a sample open, got INT64, "
OTHER = "expected the sizes of one sample, without the batch"


@pytest.mark.parametrize(
    ("sizes", "shape", "says"),
    [
        (("n", 1, "height", 5), (), f"{OPEN}nx1xheightx5; say how large one is: --shape 1,8,5, for example"),
        (
            ("n",),
            (),
            "must be floats, integers or booleans of shape (batch, …), got INT64, n; export the model like that",
        ),
        (("n", "length", 5), (7, 4), f"--shape 7,4: the input ids has INT64, nxlengthx5; {OTHER}"),
        (("n", "length"), (7, 4), f"--shape 7,4: the input ids has INT64, nxlength; {OTHER}"),
    ],
)
def test_open_sizes_are_asked_for_in_one_sentence(
    tmp_path: Path, sizes: tuple[str | int, ...], shape: tuple[int, ...], says: str
) -> None:
    tokens.write_graph(tmp_path / "their.onnx", *sizes)
    with pytest.raises(ModelError) as told:
        export_onnx(tmp_path / "their.onnx", tmp_path / "model", shape=shape)
    assert str(told.value) == (says if shape else f"the input ids {says}")


def test_onnx_runtime_prints_nothing_beside_the_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A failing pass and a file that is no graph: one sentence each, and no red lines of ONNX Runtime's own log."""
    tokens.write_graph(tmp_path / "their.onnx", "n", 3)
    manifest = export_onnx(tmp_path / "their.onnx", tmp_path / "model")
    loss = OnnxLoss.in_folder(tmp_path / "model").on(Batch(np.array([[1, 2, 1000]]), np.zeros(1, np.int64)))
    version = f"ONNX Runtime {onnxruntime.__version__} refuses"
    with pytest.raises(ModelError) as told:
        loss(read_weights(tmp_path / "model" / WEIGHTS, manifest))
    assert str(told.value) == (
        f"{version} a forward pass: Gather: indices element out of data bounds, idx=1000 must be within the inclusive "
        "range [-1000,999]"
    )
    with pytest.raises(ModelError, match=f"^{re.escape(version)} the model: .*graph"):
        OnnxLoss(manifest, bytes([8, 8]))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("file", "says"),
    [("model.onnx", "not the graph"), ("manifest.json", "no exported model"), (WEIGHTS, "does not hold")],
)
def test_a_damaged_folder_is_refused(small: tuple[nn.Module, Path], tmp_path: Path, file: str, says: str) -> None:
    folder = Path(shutil.copytree(small[1], tmp_path / "model"))
    raw = (folder / file).read_bytes()
    (folder / file).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ModelError, match=says):
        read_weights(folder / WEIGHTS, read_manifest(folder))


def test_the_weights_file_follows_the_safetensors_format(small: tuple[nn.Module, Path]) -> None:
    raw = (small[1] / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert size % 8 == 0
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    for name, weight in small[0].named_parameters():
        start, stop = header[name]["data_offsets"]
        values = np.frombuffer(body[start:stop], "<f4").reshape(header[name]["shape"])
        np.testing.assert_array_equal(values, weight.detach().numpy())
    assert header.keys() == dict(small[0].named_parameters()).keys()
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(body)


def _foreign(path: Path, kind: int = TensorProto.FLOAT, *, softmax: bool = False, opset: int = 17) -> dict[str, F32]:
    """Another tool's classifier: a normalisation with statistics, a clip, a reshape and a layer. Some names clash with
    those that an export adds."""
    random = np.random.default_rng(0)
    exact = np.float16 if kind == TensorProto.FLOAT16 else np.float32
    numbers = {
        "x": random.normal(0, 0.3, (4, 2, 3, 3)),
        "loss": random.normal(1, 0.1, 4),
        "shift": random.normal(0, 0.1, 4),
        "mean": random.normal(0, 0.1, 4),
        "variance": random.uniform(0.5, 1, 4),
        "dense": random.normal(0, 0.3, (64, 5)),
        "logits": random.normal(0, 0.3, 5),
        "limit": np.array(3.0),
    }
    tensors = {name: values.astype(exact) for name, values in numbers.items()}
    name = "float16" if kind == TensorProto.FLOAT16 else "float"
    graph = onnx.parser.parse_graph(f"""
        foreign ({name}[n, 2, 4, 4] image) => ({name} {"likely" if softmax else "y"}) {{
            conv = Conv <pads = [1, 1, 1, 1]> (image, x)
            normal = BatchNormalization(conv, loss, shift, mean, variance)
            clipped = Clip(normal, , limit)
            flat = Reshape(clipped, sizes)
            product = MatMul(flat, dense)
            y = Add(product, logits)
            {"likely = Softmax(y)" if softmax else ""}
        }}
    """)
    graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in tensors.items())
    graph.initializer.append(numpy_helper.from_array(np.array([-1, 64]), "sizes"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, path)
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def _loss_by_hand(tensors: dict[str, F32], batch: Batch) -> float:
    t = {name: torch.from_numpy(values) for name, values in tensors.items()}
    x = nn.functional.conv2d(torch.from_numpy(batch.x), t["x"], padding=1)
    x = nn.functional.batch_norm(x, t["mean"], t["variance"], t["loss"], t["shift"])
    output = x.clamp(max=float(t["limit"])).flatten(1) @ t["dense"] + t["logits"]
    return float(nn.functional.cross_entropy(output, torch.from_numpy(batch.y)))


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(
    ("kind", "close"), [(TensorProto.FLOAT, 1e-5), (TensorProto.FLOAT16, 5e-3)], ids=["float32", "float16"]
)
def test_a_foreign_classifier_is_taken_with_its_weights_as_inputs(
    tmp_path: Path, softmax: bool, kind: int, close: float
) -> None:
    tensors = _foreign(tmp_path / "foreign.onnx", kind, softmax=softmax)
    manifest = export_onnx(tmp_path / "foreign.onnx", tmp_path / "model")
    assert [tensor.name for tensor in manifest.weights] == ["x", "loss", "shift", "dense", "logits"]
    assert (manifest.input_shape, manifest.classes, manifest.trajectory) == ((2, 4, 4), 5, "")
    weights = read_weights(tmp_path / "model" / WEIGHTS, manifest)
    runtime, batch = OnnxLoss.in_folder(tmp_path / "model", micro_batch=4), _batch((2, 4, 4), 7)
    batch = Batch(batch.x, batch.y % 5)
    assert runtime.on(batch)(weights) == pytest.approx(_loss_by_hand(tensors, batch), abs=close)
    moved = _moved(weights, 0)
    there = _loss_by_hand(tensors | manifest.split(moved), batch)
    assert abs(there - _loss_by_hand(tensors, batch)) > 10 * close
    assert runtime.on(batch)(moved) == pytest.approx(there, abs=close)


def test_frozen_weights_stay_inside_the_graph(tmp_path: Path) -> None:
    _foreign(tmp_path / "foreign.onnx")
    manifest = export_onnx(tmp_path / "foreign.onnx", tmp_path / "model", ["x", "s*"])
    assert [tensor.name for tensor in manifest.weights] == ["loss", "dense", "logits"]
    with pytest.raises(ModelError, match="--freeze nothing: no weight"):
        export_onnx(tmp_path / "foreign.onnx", tmp_path / "other", ["nothing"])


def test_unusable_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    _foreign(tmp_path / "old.onnx", opset=12)
    (tmp_path / "noise.onnx").write_bytes(b"noise")
    for name, says in (
        ("old.onnx", "opset 12, expected 13"),
        ("noise.onnx", "cannot be read as an ONNX model"),
        ("none.onnx", "cannot be read as an ONNX model"),
    ):
        with pytest.raises(ModelError, match=says):
            export_onnx(tmp_path / name, tmp_path / "model")
    (tmp_path / "taken").touch()
    with pytest.raises(ModelError, match="give another --out"):
        export_onnx(tmp_path / "old.onnx", tmp_path / "taken")
