"""Nets for the digits whose weights ONNX Runtime's tools have turned into integers."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, load, numpy_helper, save
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

from baffle.core.samples import Array
from tests.support.onnx_nets import Net

SIZES = {"first": 4 * 9, "second": 36 * 16, "last": 16 * 10}  # of the three matrices
BIASES = 4 + 16 + 10
NUMBERS = sum(SIZES.values()) + BIASES


def floats(path: Path, *, softmax: bool = False) -> Path:
    """A convolution and two linear layers, in floats."""
    net = Net(1, 8, 8, opset=17)
    x = net.add("Conv", "samples", net.weight(4, 1, 3, 3, name="first"), net.weight(4, name="bias1"), strides=[2, 2])
    x = net.add(
        "Flatten", net.add("MaxPool", net.add("Relu", x), kernel_shape=[2, 2], pads=[0, 0, 1, 1], strides=[1, 1])
    )
    x = net.add("Gemm", x, net.weight(16, 36, name="second"), net.weight(16, name="bias2"), transB=1)
    x = net.add("Gemm", net.add("Relu", x), net.weight(10, 16, name="last"), net.weight(10, name="bias3"), transB=1)
    model = load(net.saved(path, net.add("Softmax", x) if softmax else x))
    for tensor in model.graph.initializer:  # smaller, so that no activation is far from those of a trained net
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) / np.float32(2), tensor.name))
    for node in model.graph.node:
        node.name = node.output[0]
    save(model, path)
    return path


class _Few:
    def __init__(self, x: Array) -> None:
        self.batches = iter([{"samples": x[:64]}])

    def get_next(self) -> dict[str, Array] | None:
        return next(self.batches, None)


def _static(source: Path, path: Path, x: Array, form: QuantFormat, *, float_head: bool = False) -> None:
    last = load(source).graph.node[-1].name
    quantize_static(
        *(source, path, _Few(x)),
        quant_format=form,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        nodes_to_exclude=[last] if float_head else [],
    )


def _optimised(source: Path, path: Path, x: Array) -> None:
    """The dynamic form, whose operators ONNX Runtime has joined into some of its own."""
    before = path.with_suffix(".before")
    FORMS["dynamic"](source, before, x)
    options = SessionOptions()
    options.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    InferenceSession(str(before), options, providers=["CPUExecutionProvider"])


FORMS: Mapping[str, Callable[[Path, Path, Array], None]] = {
    "dynamic": lambda source, path, _x: quantize_dynamic(source, path),
    "dynamic, by channel": lambda source, path, _x: quantize_dynamic(source, path, per_channel=True),
    "joined": _optimised,
    "QDQ": partial(_static, form=QuantFormat.QDQ),
    "QOperator": partial(_static, form=QuantFormat.QOperator),
    "float head": partial(_static, form=QuantFormat.QDQ, float_head=True),
}


def int8(path: Path, form: str, x: Array, *, softmax: bool = False) -> Path:
    """The net in one of these forms, with scales for samples like `x`."""
    logging.getLogger().setLevel(logging.ERROR)  # the tool advises to prepare models
    source = floats(path.with_name("floats.onnx"), softmax=softmax)
    FORMS[form](source, path, x)
    return path


def head_of_two(path: Path, x: Array, form: str) -> Path:
    """A linear layer of a product and a sum, in QOperator form or as ONNX Runtime's joined operator."""
    net = Net(1, 8, 8, opset=17)
    flat = net.add("Flatten", "samples")
    if form == "QOperator":
        x8 = net.add("MatMul", flat, net.weight(64, 10, name="last"))
        source = net.saved(path.with_name("floats.onnx"), net.add("Add", x8, net.weight(10, name="bias3")))
        _static(source, path, x, QuantFormat.QOperator)
        return path
    matrix = np.random.default_rng(0).integers(-127, 128, (64, 10)).astype(np.int8)
    names = [net.constant(matrix, "last_quantized"), net.constant(np.array(0.01, np.float32), "last_scale")]
    zero = net.constant(np.array(3, np.int8), "last_zero_point")
    model = load(net.saved(path, flat))
    nodes, quantised = model.graph.node, ["x8", "x8_scale", "x8_zero"]
    nodes.append(helper.make_node("DynamicQuantizeLinear", [flat], quantised))
    given = ["x8", names[0], "x8_scale", names[1], "x8_zero", zero]
    nodes.append(helper.make_node("MatMulIntegerToFloat", given, ["out"], domain="com.microsoft"))
    model.graph.output[0].name = "out"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    save(model, path)
    return path


def answers(model: ModelProto, x: Array) -> Array:
    """What ONNX Runtime makes of a model, without BAFFLE."""
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"samples": x})[0])


def integers(model: ModelProto) -> dict[str, bytes]:
    """The integer tensors of a model."""
    kinds = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32)
    tensors = (tensor for tensor in model.graph.initializer if tensor.data_type in kinds)
    return {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in tensors}
