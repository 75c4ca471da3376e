"""Models whose weights are integers with a scale. What of them can be trained as floats: the last linear layer, and a
factor for each scale. Both are rewrites of the file's graph, and a trained model is the rewritten one."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from baffle.core.arrays import F32
from baffle.core.samples import Array
from baffle.errors import NoHeadError
from baffle.runtime.onnx.head import KEEPS
from baffle.runtime.onnx.nodes import computing, copy_of, nodes_of, replace_all, setting
from baffle.runtime.onnx.session import open_session

INTEGERS = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4)

_BINARY = (1, 2, 4, 5, 6, 7)  # of an operator on two tensors

SETTINGS: Mapping[str, tuple[int, ...]] = {
    **{"QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "MatMulInteger": (2, 3), "ConvInteger": (2, 3)},
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"), _BINARY),
    **{"QGemm": (1, 2, 4, 5, 7, 8), "MatMulIntegerToFloat": (2, 3, 4, 5), "DynamicQuantizeMatMul": (2, 3)},
    **{"DynamicQuantizeLSTM": (8, 9, 10, 11), "QAttention": (3, 4, 6, 7)},
}
"""Positions of operator inputs that are scales or zero points. In other operators QLinear… all but the first are."""

SCALED: Mapping[str, tuple[int, int]] = {
    **{"DequantizeLinear": (0, 1), "QLinearConv": (3, 4), "QLinearMatMul": (3, 4), "QGemm": (3, 4)},
    **{"MatMulIntegerToFloat": (1, 3), "DynamicQuantizeMatMul": (1, 2)},
}
"""Positions of integer weights and of their scale."""

FACTOR = "/factor"  # ends the name of what a scale is multiplied by

MOST_STEPS = 100  # back from the outputs to the last linear layer; a damaged graph may go in circles

Makers = Mapping[str, NodeProto]


def _makers(model: ModelProto) -> Makers:
    return {name: node for node in model.graph.node for name in node.output}


def _tensors(model: ModelProto) -> dict[str, TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def settings_of(node: NodeProto) -> tuple[int, ...]:
    """Positions of what only says how a node's integers are scaled."""
    others = tuple(range(1, len(node.input))) if node.op_type.startswith("QLinear") else ()
    return SETTINGS.get(node.op_type, others)


def scales_of(model: ModelProto) -> dict[str, str]:
    """The factor of each scale of integer weights. A bias in int32 is in units of the product of two scales, so it has
    the factor of its weights."""
    makers, tensors, factors = _makers(model), _tensors(model), dict[str, str]()
    for node in model.graph.node:
        if node.input and node.input[-1].endswith(FACTOR):
            factors[node.input[0]] = node.input[-1]
        elif node.op_type in SCALED:
            weight, scale = (node.input[at] for at in SCALED[node.op_type])
            if weight in tensors and tensors[weight].data_type in INTEGERS and scale in tensors:
                factors[scale] = scale + FACTOR
        else:  # perhaps an activation's scale, which is known when the model runs, times that of the weights
            dynamic = [name for name in node.input if _is_dynamic(makers.get(name), name)]
            others = [name for name in node.input if name not in dynamic]
            if node.op_type == "Mul" and len(dynamic) == len(others) == 1 and others[0] in tensors:
                factors[others[0]] = others[0] + FACTOR
    for node in model.graph.node:
        behind = [makers.get(name) for name in node.input[1:3]]
        scales = [maker.input[1] for maker in behind if maker is not None and maker.op_type == "DequantizeLinear"]
        if len(scales) == 2 and scales[0] in factors and scales[1] in tensors:
            factors.setdefault(scales[1], factors[scales[0]])
    return factors


def _is_dynamic(maker: NodeProto | None, name: str) -> bool:
    return maker is not None and maker.op_type == "DynamicQuantizeLinear" and name == maker.output[1]


def with_factors(model: ModelProto) -> ModelProto:
    """The model with a factor of 1 for each scale of integer weights."""
    model, factors = copy_of(model), scales_of(model)
    tensors = _tensors(model)
    for node in nodes_of(model.graph):
        replace_all(node.input, [f"{name}/scaled" if name in factors else name for name in node.input])
    scaled = [helper.make_node("Mul", [scale, factor], [f"{scale}/scaled"]) for scale, factor in factors.items()]
    replace_all(model.graph.node, [*scaled, *model.graph.node])
    for scale, factor in factors.items():
        if factor == scale + FACTOR:
            ones = np.ones_like(numpy_helper.to_array(tensors[scale]))
            model.graph.initializer.append(numpy_helper.from_array(ones, factor))
    return model


def without_factors(model: ModelProto) -> ModelProto:
    """The same model, whose factors have become part of the scales."""
    model, tensors = copy_of(model), _tensors(model)
    scaled = [node for node in model.graph.node if len(node.input) == 2 and node.input[1].endswith(FACTOR)]
    for node in scaled:
        scale, factor = (numpy_helper.to_array(tensors[name]) for name in node.input)
        product = numpy_helper.from_array(scale * factor, node.input[0])
        replace_all(
            model.graph.initializer, [product if t.name == product.name else t for t in model.graph.initializer]
        )
    names = {node.output[0]: node.input[0] for node in scaled}
    replace_all(model.graph.node, [node for node in model.graph.node if node not in scaled])
    for node in nodes_of(model.graph):
        replace_all(node.input, [names.get(name, name) for name in node.input])
    return computing(model, *(value.name for value in model.graph.output))


def with_float_head(model: ModelProto, output: str) -> ModelProto:
    """The model with its last linear layer in floats, whose numbers are those of its integers, and nothing rounded
    behind it. Other models than those of a linear layer are refused, with what was found."""
    model = copy_of(model)
    value, added = output, ""
    for _ in range(MOST_STEPS):
        makers, constant = _makers(model), _Constants(model)
        node = makers.get(value)
        if node is None:
            raise NoHeadError("the outputs come from an input")
        if node.op_type in ("Gemm", "MatMul"):
            break
        behind = makers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if node.op_type in (*KEEPS, "Softmax", "LogSoftmax"):
            value = node.input[0]
        elif node.op_type == "Add" and not added and sum(map(constant, node.input)) == 1:
            value, added = sorted(node.input, key=constant)
        elif behind is not None and behind.op_type == "QuantizeLinear":  # outputs that were only rounded
            _rename(model, {value: f"{value}/rounded", behind.input[0]: value})
        elif in_floats := _in_floats(node, makers):
            at = list(model.graph.node).index(node)
            replace_all(model.graph.node, [*model.graph.node[:at], *in_floats, *model.graph.node[at + 1 :]])
        else:
            raise NoHeadError(f"the outputs come from {(behind or node).op_type}")
    else:
        raise NoHeadError("the outputs come from no linear layer nearby")
    for name in filter(None, (*node.input[1:], added)):
        if name in makers and constant(name):
            _fold(model, name)
    return computing(model, *(each.name for each in model.graph.output))


class _Constants:
    """Whether a value follows from the model alone."""

    def __init__(self, model: ModelProto) -> None:
        self.makers, self.tensors = _makers(model), _tensors(model)

    def __call__(self, name: str) -> bool:
        maker = self.makers.get(name)
        return name in self.tensors or (maker is not None and all(map(self, maker.input)))


def _rename(model: ModelProto, names: Mapping[str, str]) -> None:
    for node in nodes_of(model.graph):
        replace_all(node.input, [names.get(name, name) for name in node.input])
        replace_all(node.output, [names.get(name, name) for name in node.output])


def _fold(model: ModelProto, name: str) -> None:
    """Turn a constant value into floats, which are named after the integers that it was computed from."""
    alone = copy_of(model)
    replace_all(alone.graph.output, [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])
    (numbers,) = open_session(computing(alone, name).SerializeToString()).run(None, {})
    makers, source = _makers(model), name
    while source in makers:
        source = makers[source].input[0]
    wanted = source.removesuffix("_quantized")
    new = name if wanted in {*_tensors(model), *makers} - {name} else wanted
    makers[name].output[0] = f"{name}/integers"
    _rename(model, {name: new})
    model.graph.initializer.append(numpy_helper.from_array(numbers.astype(np.float32), new))


def _in_floats(node: NodeProto, makers: Makers) -> list[NodeProto]:
    """Nodes that compute in floats what an operator on integers gives, or what is then dequantised; none for other
    operators."""
    out, nodes = node.output[0], list[NodeProto]()
    inner = makers.get(node.input[0], node) if node.op_type == "DequantizeLinear" else node
    inputs = [*inner.input, *[""] * 9]

    def floats(tensor: str, scale: str, zero: str = "", *, axis: int = 0) -> str:
        maker = makers.get(tensor)
        if maker is not None and maker.op_type == "DynamicQuantizeLinear":
            return str(maker.input[0])
        given, name = [tensor, scale, *([zero] if zero else [])], f"{out}/floats{len(nodes)}"
        nodes.append(helper.make_node("DequantizeLinear", given, [name], axis=axis))
        return name

    def add(operator: str, *given: str, to: str = out, **how: Any) -> None:
        nodes.append(helper.make_node(operator, given, [to], **how))

    match inner.op_type:
        case "QLinearMatMul" | "QLinearAdd" as kind if inner is not node:
            axis = 1 if kind == "QLinearMatMul" else 0
            add(kind.removeprefix("QLinear"), floats(*inputs[:3]), floats(*inputs[3:6], axis=axis))
        case "QLinearSoftmax" if inner is not node:
            add("Softmax", floats(*inputs[:3]), axis=setting(inner, "axis", -1))
        case "QGemm" if (inner is not node) == bool(inputs[7]):
            how = {name: setting(inner, name, default) for name, default in (("alpha", 1.0), ("transB", 0))}
            given = [floats(*inputs[:3]), floats(*inputs[3:6], axis=1 - how["transB"])]
            if inputs[6]:
                add("Mul", inputs[1], inputs[4], to=f"{out}/unit")
                given.append(floats(inputs[6], f"{out}/unit"))
            add("Gemm", *given, transA=setting(inner, "transA", 0), **how)
        case "DynamicQuantizeMatMul" | "MatMulIntegerToFloat" as kind:
            direct = kind == "DynamicQuantizeMatMul"
            scale, zero, bias = (inputs[at] for at in ((2, 3, 4) if direct else (3, 5, 6)))
            x = inputs[0] if direct else floats(inputs[0], inputs[2], inputs[4])
            add("MatMul", x, floats(inputs[1], scale, zero, axis=1), to=f"{out}/product" if bias else out)
            if bias:
                add("Add", f"{out}/product", bias)
        case "Mul" if found := _integer_product(node, makers):
            product, scale = found
            zero = product.input[3] if len(product.input) > 3 else ""
            add("MatMul", floats(product.input[0], ""), floats(product.input[1], scale, zero, axis=1))
    return nodes


def _integer_product(node: NodeProto, makers: Makers) -> tuple[NodeProto, str] | None:
    """The MatMulInteger whose result, cast to floats, a node multiplies with the scales of both of its factors; and the
    scale of the weights."""
    for cast, scales in (node.input, reversed(node.input)):
        units, product = makers.get(scales), makers.get(makers[cast].input[0]) if cast in makers else None
        if product is not None and units is not None and (product.op_type, units.op_type) == ("MatMulInteger", "Mul"):
            constant = [name for name in units.input if not _is_dynamic(makers.get(name), name)]
            if len(constant) == 1:
                return product, constant[0]
    return None


def with_integers(model: ModelProto, names: Collection[str]) -> ModelProto:
    """The model with these matrices of linear layers as int8, with a scale for each output."""
    model, tensors = copy_of(model), _tensors(model)
    for node in list(model.graph.node):
        if node.op_type not in ("Gemm", "MatMul") or node.input[1] not in names:
            continue
        name = node.input[1]
        matrix, axis = numpy_helper.to_array(tensors[name]), 1 - int(setting(node, "transB", 0))
        largest = np.abs(matrix).max(axis=1 - axis, keepdims=True)
        scale: F32 = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        integers = np.rint(matrix / scale).astype(np.int8)
        parts: dict[str, Array] = {f"{name}_quantized": integers, f"{name}_scale": scale.reshape(-1)}
        kept = [tensor for tensor in model.graph.initializer if tensor.name not in (name, *parts)]
        kept += [numpy_helper.from_array(values, part) for part, values in parts.items()]
        replace_all(model.graph.initializer, kept)
        dequantise = helper.make_node("DequantizeLinear", list(parts), [name], axis=axis)
        replace_all(model.graph.node, [dequantise, *model.graph.node])
    return model
