"""ONNX files as strangers write them: `baffle export model.onnx` refuses them by name, in little memory."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from baffle.errors import ModelError
from baffle.export import export_onnx
from baffle.runtime.onnx.foreign import graph_from_file
from tests.support.memory import at_most

LITTLE = 32 << 20


def classifier(*constants: TensorProto) -> ModelProto:
    """A small classifier, with these tensors beside its weights."""
    weights = numpy_helper.from_array(np.ones((4, 3), np.float32), "weights")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        "hostile",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [weights, *constants],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def tensor(kind: int = TensorProto.FLOAT, dims: tuple[int, ...] = (4,), raw: bytes = b"") -> TensorProto:
    made = TensorProto(name="more", data_type=kind, dims=dims)
    if raw:
        made.raw_data = raw
    return made


def external(location: str, **about: int) -> TensorProto:
    made = TensorProto(name="more", data_type=TensorProto.FLOAT, dims=(4,), data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **about}.items():
        made.external_data.add(key=key, value=str(value))
    return made


def many_of_one_file(folder: Path) -> ModelProto:
    """Ten thousand tensors, each of which is all of one file."""
    (folder / "numbers").touch()
    os.truncate(folder / "numbers", 1 << 20)
    return classifier(*(external("numbers") for _ in range(10_000)))


def strange_sample() -> ModelProto:
    model = classifier()
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    return model


def nested() -> ModelProto:
    model = classifier()
    inner = model.graph
    for _ in range(30):
        inner = inner.node.add(op_type="If", output=["z"]).attribute.add(name="then_branch", type=5).g
    return model


MODELS: dict[str, Callable[[Path], ModelProto]] = {
    "a tensor of 2^60 numbers": lambda _: classifier(tensor(dims=(2**60,))),
    "a tensor of 2^60 numbers, four of them there": lambda _: classifier(tensor(dims=(2**60,), raw=bytes(16))),
    "a tensor whose sizes overflow": lambda _: classifier(tensor(dims=(2**62, 2**62), raw=bytes(16))),
    "a tensor of negative size": lambda _: classifier(tensor(dims=(-4,), raw=bytes(16))),
    "a tensor that was cut": lambda _: classifier(tensor(dims=(4,), raw=bytes(7))),
    "numbers from a file that is not there": lambda _: classifier(external("none")),
    "numbers from a file elsewhere": lambda _: classifier(external("../../etc/passwd")),
    "numbers from a device": lambda _: classifier(external("/dev/zero")),
    "2^60 numbers from a file": lambda _: classifier(external("hostile.onnx", length=2**60)),
    "fewer than no numbers": lambda _: classifier(external("hostile.onnx", length=-1)),
    "one file ten thousand times": many_of_one_file,
    "samples that are text": lambda _: strange_sample(),
    "graphs in graphs": lambda _: nested(),
    "nothing": lambda _: ModelProto(),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_model_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.onnx"
    path.write_bytes(MODELS[name](tmp_path).SerializeToString())
    with at_most(LITTLE), pytest.raises(ModelError) as fault:
        export_onnx(path, tmp_path / "model")
    assert len(str(fault.value).splitlines()) == 1
    assert not (tmp_path / "model").exists()


def test_a_file_that_never_ends_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "hostile.onnx"
    path.touch()
    os.truncate(path, 1 << 40)
    with (
        at_most(1 << 20),
        pytest.raises(ModelError, match=r"hostile\.onnx cannot be read as an ONNX model: it is longer"),
    ):
        graph_from_file(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="it is not a file"):
        graph_from_file(path)


def test_numbers_in_a_file_beside_the_model_are_read(tmp_path: Path) -> None:
    model = classifier()
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="numbers", size_threshold=0)
    assert (tmp_path / "numbers").exists()
    np.testing.assert_array_equal(graph_from_file(tmp_path / "model.onnx").weights["weights"], np.ones((4, 3)))


@settings(max_examples=200)
@given(st.data())
def test_any_changed_model_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("models") / "changed.onnx"
    content = bytearray(classifier(tensor(raw=bytes(16))).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    with at_most(LITTLE), suppress(ModelError):
        graph_from_file(path)
