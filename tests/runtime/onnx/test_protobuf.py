"""ONNX models as bytes: BAFFLE's own writer and reader, against the `onnx` package and against strangers."""

from contextlib import suppress

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from baffle.errors import ModelError
from baffle.models.inputs import Inputs
from baffle.plan import LeNet
from baffle.runtime.onnx.built_in import built_in
from baffle.runtime.onnx.protobuf import MOST_DEPTH, PARTS, message, node, require_whole, tensor
from baffle.runtime.onnx.session import open_session

MODEL = built_in(LeNet(channels=(2, 2)), Inputs((1, 4, 4), 3), 0).model
ELSEWHERE = "takes numbers from other files"


def external(location: str = "numbers") -> TensorProto:
    made = TensorProto(name="more", data_type=TensorProto.FLOAT, dims=(1,), data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="location", value=location)
    return made


def ways() -> dict[str, ModelProto]:
    """Models with an external tensor in every place that has room for one."""
    models = {name: ModelProto.FromString(MODEL) for name in ("initializer", "sparse", "attribute", "attributes")}
    models |= {name: ModelProto.FromString(MODEL) for name in ("branch", "branches", "function", "training", "half")}
    models["initializer"].graph.initializer.append(external())
    models["sparse"].graph.sparse_initializer.add().values.CopyFrom(external())
    models["attribute"].graph.node[0].attribute.add(name="t").t.CopyFrom(external())
    models["attributes"].graph.node[0].attribute.add(name="t").tensors.append(external())
    models["branch"].graph.node[0].attribute.add(name="g").g.initializer.append(external())
    models["branches"].graph.node[0].attribute.add(name="g").graphs.add().initializer.append(external())
    models["function"].functions.add().node.add().attribute.add(name="t").t.CopyFrom(external())
    models["training"].training_info.add().algorithm.initializer.append(external())
    models["half"].graph.initializer.add(data_location=TensorProto.EXTERNAL)  # what it lacks, a second half may add
    return models


@pytest.mark.parametrize("name", ways())
def test_numbers_elsewhere_are_refused_wherever_they_are_named(name: str) -> None:
    """N6."""
    require_whole(MODEL)
    with pytest.raises(ModelError, match=ELSEWHERE):
        open_session(ways()[name].SerializeToString())


def test_the_reader_knows_every_place_of_a_tensor() -> None:
    """A table of ours against the messages of the `onnx` package."""
    found, left = dict[str, dict[int, str]](), [ModelProto.DESCRIPTOR]
    while left:
        kind = left.pop()
        if kind.name not in found:
            inner = [field for field in kind.fields if field.message_type]
            found[kind.name] = {field.number: field.message_type.name for field in inner}
            left += [field.message_type for field in inner]
    holds = {"TensorProto"}
    while more := {kind for kind, inner in found.items() if holds & {*inner.values()}} - holds:
        holds |= more
    expected = {kind: {number: inner for number, inner in found[kind].items() if inner in holds} for kind in holds}
    assert expected == PARTS
    names = {field.name: field.number for field in TensorProto.DESCRIPTOR.fields}
    assert (names["external_data"], names["data_location"]) == (13, 14)


def test_the_same_field_written_in_other_ways_is_refused() -> None:
    """Readers of protobuf merge a message that comes twice, and cut numbers that are too large."""
    whole = ModelProto.FromString(MODEL)
    whole.graph.initializer.append(TensorProto(name="more", data_type=1, dims=[1], raw_data=bytes(4)))
    tail = ModelProto(graph=GraphProto(initializer=[external()])).SerializeToString()
    with pytest.raises(ModelError, match=ELSEWHERE):
        require_whole(whole.SerializeToString() + tail)
    far = message((7, message((5, b"\xf2\x80\x80\x80\x80\x01\x00"))))  # field 14 if its number is cut to 32 bits
    with pytest.raises(ModelError, match="number is too large"):
        require_whole(far)


def test_graphs_in_graphs_and_damaged_bytes_end_in_a_sentence() -> None:
    data = b""
    for _ in range(MOST_DEPTH):
        data = message((1, message((5, message((6, data))))))
    with pytest.raises(ModelError, match="parts in more than"):
        require_whole(message((7, data)))
    for damaged, words in (
        (MODEL[:-1], "ends within"),
        (b"\xff" * 11, "ends within a number"),
        (b"\x0b", "stored in no known way"),
        (b"\x3a\x7f", "ends within a field"),
    ):
        with pytest.raises(ModelError, match=words):
            require_whole(damaged)


@given(st.binary(max_size=200), st.integers(0, len(MODEL)))
def test_no_bytes_end_in_anything_else(noise: bytes, place: int) -> None:
    for data in (noise, MODEL[:place] + noise + MODEL[place:], MODEL[:place] + noise + MODEL[place + len(noise) :]):
        with suppress(ModelError):
            require_whole(data)


def test_bytes_that_look_like_onnx_runtimes_own_format_are_read_as_onnx() -> None:
    """That format begins with four bytes and "ORTM", which an unknown field of a message may hold. It has numbers in
    other files, too, and no reader of ours."""
    disguised = message((100, b" ORTM")) + MODEL
    assert disguised[4:8] == b"ORTM"
    require_whole(disguised)
    assert [value.name for value in open_session(disguised).get_outputs()] == ["loss", "logits"]


def test_what_is_written_is_what_onnx_writes() -> None:
    values = np.array([[1.5, -2.0]], np.float32)
    assert tensor("t", values) == numpy_helper.from_array(values, "t").SerializeToString()
    ours = node("Op", ["a", ""], ["b"], i=-100, f=0.5, s="none", ints=[3, -1], t=tensor("t", values))
    theirs = helper.make_node(
        "Op", ["a", ""], ["b"], i=-100, f=0.5, s="none", ints=[3, -1], t=numpy_helper.from_array(values, "t")
    )
    assert ours == theirs.SerializeToString()
    onnx.checker.check_model(MODEL, full_check=True)
