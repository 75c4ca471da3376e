"""How the operators of ONNX compute with weights that directions move: x (W + a bᵀ) = x W + (x·a) bᵀ.

A rule gets a node that uses a weight and returns the tensor that takes the place of the node's output, with a row for
each direction and sample. A view is what a node makes of a weight alone.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from baffle.errors import ModelError
from baffle.runtime.onnx.outer_builder import DIRECTIONS, SAMPLES, Factored, Moved, OuterBuilder
from baffle.runtime.onnx.probing import FEW

Rule = Callable[[OuterBuilder, NodeProto], str]
View = Callable[[OuterBuilder, NodeProto], Factored | Moved]


def _multiply(graph: OuterBuilder, node: NodeProto) -> str:
    x, weight = node.input
    return _times(graph, x, graph.factored(weight), node.output[0], lambda x: graph.add("MatMul", x, weight))


def _gemm(graph: OuterBuilder, node: NodeProto) -> str:
    x, weight, *rest = node.input
    how = attributes(node)
    if how.pop("transA", 0):
        raise ModelError("it transposes the samples")
    alpha, beta, turned = how.pop("alpha", 1.0), how.pop("beta", 1.0), how.pop("transB", 0)
    bias = rest[0] if rest and rest[0] in graph.views else ""
    constant = rest if not bias else []

    def multiply(x: str) -> str:
        return graph.add("Gemm", x, weight, *constant, alpha=alpha, beta=beta, transB=turned)

    if weight in graph.views:
        matrix = graph.factored(weight)
        if turned:
            matrix = Factored(matrix.name, matrix.sizes[::-1], matrix.b, matrix.a)
        output = _times(graph, x, matrix, node.output[0], multiply, alpha)
    else:
        output = multiply(graph.rows(x))
    if bias:
        moved = graph.whole(bias)
        scaled = moved.name if beta == 1 else graph.add("Mul", moved.name, graph.constant(np.array(beta, np.float32)))
        output = _with_each(graph, "Add", output, Moved(scaled, moved.sizes), node.output[0])
    return output


def _times(
    graph: OuterBuilder,
    x: str,
    matrix: Factored,
    output: str,
    multiply: Callable[[str], str],
    alpha: float = 1.0,
) -> str:
    """x times a moved matrix: rows of x are dotted with `a`, and each of these numbers multiplies `b`."""
    sizes, samples = graph.sizes_apart(x)
    inputs, outputs = matrix.sizes
    if samples == len(sizes) - 1:
        raise ModelError("it sums over samples")
    before = prod(sizes[:samples])
    if once := graph.once.get(x):
        numbers = graph.add("MatMul", graph.reshape(once, before, -1, inputs), graph.add("Transpose", matrix.a))
        numbers = graph.unsqueeze(graph.add("Transpose", numbers, perm=[0, 2, 1]), 3)
        product = graph.reshape(multiply(once), before, 1, -1, outputs)
    else:
        grouped = graph.reshape(graph.rows(x), before, DIRECTIONS, -1, inputs)
        if before > 1:  # few products of many rows are quicker than many of few
            together = graph.reshape(graph.add("Transpose", grouped, perm=[1, 0, 2, 3]), DIRECTIONS, -1, inputs)
            numbers = graph.reshape(
                graph.add("MatMul", together, graph.unsqueeze(matrix.a, 2)), DIRECTIONS, before, -1, 1
            )
            numbers = graph.add("Transpose", numbers, perm=[1, 0, 2, 3])
        else:
            numbers = graph.add("MatMul", grouped, graph.unsqueeze(matrix.a, 2))
        product = graph.reshape(multiply(graph.rows(x)), before, DIRECTIONS, -1, outputs)
    if alpha != 1:
        numbers = graph.add("Mul", numbers, graph.constant(np.array(alpha, np.float32)))
    added = graph.add("Mul", numbers, graph.unsqueeze(matrix.b, 1))
    return graph.with_rows(graph.add("Add", product, added), output)


def _convolve(graph: OuterBuilder, node: NodeProto) -> str:
    x, weight, *bias = node.input
    how = attributes(node)
    bias = [name for name in bias if name]
    constant = bias if bias and bias[0] not in graph.views else []
    output = graph.rows(x)
    if weight in graph.views:
        output = _filtered(graph, node, graph.factored(weight), constant)
    else:
        output = graph.add("Conv", output, weight, *constant, **how)
    return output if bias == constant else _by_channel(graph, "Add", output, node.output[0], bias[0])


def _filtered(graph: OuterBuilder, node: NodeProto, filters: Factored, bias: list[str]) -> str:
    """A convolution with moved filters. A direction's own are all `b`, each times a number of `a`: so one more filter
    responds, in each group, and its responses are multiplied by `a`."""
    how, x = attributes(node), node.input[0]
    groups = how.get("group", 1)
    (_, _, *image), samples = graph.sizes(x)
    (_, channels, *responses), _ = graph.sizes(node.output[0])
    if samples:
        raise ModelError("samples are not its first axis")
    each = (groups, channels // groups, prod(responses))
    inner, kernel = filters.sizes[1], filters.sizes[2:]
    once = graph.once.get(x)
    if once and groups == 1:
        alike = graph.add("Conv", once, graph.reshape(filters.b, DIRECTIONS, inner, *kernel), **how)
        turned = graph.add("Transpose", alike, perm=[1, 0, *range(2, 2 + len(kernel))])
        response = graph.reshape(turned, DIRECTIONS, -1, 1, 1, each[2])
    else:
        rows = graph.reshape(once or graph.rows(x), 1 if once else DIRECTIONS, -1, groups, inner, prod(image))
        by_place = graph.reshape(filters.b, DIRECTIONS, 1, 1, inner, prod(kernel))
        by_place = graph.add("Transpose", by_place, perm=[0, 1, 2, 4, 3])
        found = graph.reshape(graph.add("MatMul", by_place, rows), -1, *kernel, *image)
        response = graph.reshape(
            _summed(graph, found, how, kernel, image, responses), DIRECTIONS, -1, groups, 1, each[2]
        )
    plain = graph.add("Conv", once or graph.rows(x), node.input[1], *bias, **how)
    added = graph.add("Mul", response, graph.reshape(filters.a, DIRECTIONS, 1, groups, each[1], 1))
    product = graph.reshape(plain, 1 if once else DIRECTIONS, -1, *each)
    return graph.with_rows(graph.add("Add", product, added), node.output[0])


def _summed(
    graph: OuterBuilder,
    found: str,
    how: Mapping[str, Any],
    kernel: Sequence[int],
    image: Sequence[int],
    responses: Sequence[int],
) -> str:
    """What a filter responds, given what each place of its kernel finds in each pixel: rows × kernel × image. It is
    summed along one axis of the image after the other, each place's numbers shifted to where they count."""
    rank = len(kernel)
    strides, dilations = how.get("strides", [1] * rank), how.get("dilations", [1] * rank)
    for axis in range(rank):
        stride, dilation = strides[axis], dilations[axis]
        before = _before(how, axis, kernel, image[axis], responses[axis])
        parts = list[str]()
        for place in range(kernel[axis]):
            offset = place * dilation - before  # response r meets pixel r · stride + offset
            first = max(0, -(offset // stride))
            stop = min(responses[axis], -(-(image[axis] - offset) // stride))
            if first < stop:
                span = (first * stride + offset, (stop - 1) * stride + offset + 1)
                parts.append(_slice(graph, found, (1 + axis, 1 + rank + axis), place, span, stride))
                parts[-1] = _pad(graph, parts[-1], 1 + rank + axis, 1 + 2 * rank, first, responses[axis] - stop)
        found = graph.add("Sum", *parts)
    return found


def _before(how: Mapping[str, Any], axis: int, kernel: Sequence[int], pixels: int, responses: int) -> int:
    """How many zeros stand before the pixels of an axis."""
    rank = len(kernel)
    kind = how.get("auto_pad", b"NOTSET")
    if kind in (b"NOTSET", b""):
        return int(how.get("pads", [0] * 2 * rank)[axis])
    reach = how.get("dilations", [1] * rank)[axis] * (kernel[axis] - 1) + 1
    zeros = max(0, (responses - 1) * how.get("strides", [1] * rank)[axis] + reach - pixels)
    return 0 if kind == b"VALID" else zeros // 2 if kind == b"SAME_UPPER" else zeros - zeros // 2


def _slice(
    graph: OuterBuilder, tensor: str, axes: tuple[int, int], place: int, span: tuple[int, int], stride: int
) -> str:
    numbers = ([place, span[0]], [place + 1, span[1]], axes, [1, stride])
    return graph.add("Slice", tensor, *(graph.constant(np.array(each, np.int64)) for each in numbers))


def _pad(graph: OuterBuilder, tensor: str, axis: int, rank: int, before: int, after: int) -> str:
    if not before and not after:
        return tensor
    zeros = np.zeros((2, rank), np.int64)
    zeros[:, axis] = before, after
    return graph.add("Pad", tensor, graph.constant(zeros.reshape(-1)))


def _look_up(graph: OuterBuilder, node: NodeProto) -> str:
    table, indices = graph.factored(node.input[0]), graph.once.get(node.input[1])
    sizes, samples = graph.sizes(node.input[1])
    if attributes(node).get("axis", 0) or indices is None or len(table.sizes) != 2:
        raise ModelError("it takes rows that depend on weights, or no rows")
    found = graph.add("Gather", table.name, indices)
    numbers = graph.unsqueeze(graph.add("Gather", table.a, indices, axis=1), len(sizes) + 1)
    added = graph.add("Mul", numbers, graph.reshape(table.b, DIRECTIONS, *[1] * len(sizes), table.sizes[1]))
    return graph.with_rows(
        _directions_at(graph, graph.add("Add", found, added), samples, len(sizes) + 2), node.output[0]
    )


def _directions_at(graph: OuterBuilder, tensor: str, axis: int, rank: int) -> str:
    """A tensor whose directions are its first axis, with them in front of axis `axis` of the others."""
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    return tensor if not axis else graph.add("Transpose", tensor, perm=order)


def _with_each(
    graph: OuterBuilder, operator: str, x: str, moved: Moved, output: str, alike: str = "", *, first: bool = False
) -> str:
    """An operator on rows and on a tensor that each direction has of its own. The rows have the sizes of the tensor
    `alike`, if these are not those of the output. `first`: the direction's own is the first operand."""
    sizes, samples = graph.sizes_apart(alike or output)
    padded = _padded(moved.sizes, sizes)
    rows = graph.reshape(x, *sizes[:samples], DIRECTIONS, -1, *sizes[samples + 1 :])
    own = _directions_at(graph, graph.reshape(moved.name, DIRECTIONS, *padded), samples, len(padded) + 1)
    result = graph.add(operator, own, rows) if first else graph.add(operator, rows, own)
    return graph.with_rows(result, output)


def _elementwise(graph: OuterBuilder, node: NodeProto) -> str:
    """An operator on rows and a weight, one of which may be repeated along axes of the other."""
    if len(node.input) != 2 or all(name in graph.views for name in node.input):
        raise ModelError("expected one weight and one tensor of samples")
    first = node.input[0] in graph.views
    weight, x = node.input if first else reversed(node.input)
    return _with_each(graph, node.op_type, graph.rows(x), graph.whole(weight), node.output[0], x, first=first)


def _normalise(graph: OuterBuilder, node: NodeProto) -> str:
    """A normalisation over the last axes: first without, and then with its scale and shift."""
    x, scale, *shift = node.input
    sizes, samples = graph.sizes(x)
    axis = attributes(node).get("axis", -1) % len(sizes)
    if samples >= axis:
        raise ModelError("it takes the mean over samples")
    ones = graph.constant(np.ones(sizes[axis:], np.float32))
    output = graph.add("LayerNormalization", graph.rows(x), ones, **attributes(node))
    for operator, name in (("Mul", scale), *(("Add", name) for name in shift if name)):
        if name in graph.views:
            output = _with_each(graph, operator, output, graph.whole(name), node.output[0])
        else:
            output = graph.add(operator, output, name)
    return output


def _normalise_channels(graph: OuterBuilder, node: NodeProto) -> str:
    """A normalisation with a scale and a shift for each channel."""
    x, scale, shift, *statistics = node.input
    if any(name in graph.views for name in statistics):
        raise ModelError("its statistics are trained")
    (_, channels, *_), _ = graph.sizes(x)
    ones, zeros = (graph.constant(fill(channels, np.float32)) for fill in (np.ones, np.zeros))
    output = graph.add(node.op_type, graph.rows(x), ones, zeros, *statistics, **attributes(node))
    for operator, name in (("Mul", scale), ("Add", shift)):
        output = _by_channel(graph, operator, output, node.output[0], name)
    return output


def _by_channel(graph: OuterBuilder, operator: str, x: str, output: str, name: str) -> str:
    """An operator on rows and a number for each channel, which is axis 1."""
    (_, channels, *image), _ = graph.sizes(output)
    ones = [1] * len(image)
    if name not in graph.views:
        return graph.add(operator, x, graph.reshape(name, channels, *ones))
    moved = graph.whole(name)
    if moved.sizes != (channels,):
        raise ModelError("expected a number for each channel")
    each = Moved(graph.reshape(moved.name, DIRECTIONS, channels, *ones), (channels, *ones))
    return _with_each(graph, operator, x, each, output)


def _repeat(graph: OuterBuilder, node: NodeProto) -> str:
    """A weight for each sample, as that of a token that stands before all others."""
    sizes, samples = graph.sizes(node.output[0])
    moved = graph.whole(node.input[0])
    padded = _padded(moved.sizes, sizes)
    if sizes[samples] != FEW:
        raise ModelError("it is repeated within a sample")
    own = graph.reshape(moved.name, DIRECTIONS, *padded)
    own = _directions_at(graph, own, samples, len(padded) + 1)
    wide = graph.add("Expand", own, graph.shape(*sizes[:samples], DIRECTIONS, SAMPLES, *sizes[samples + 1 :]))
    return graph.with_rows(wide, node.output[0])


def _same(graph: OuterBuilder, node: NodeProto) -> Factored | Moved:
    if attributes(node).get("to", TensorProto.FLOAT) != TensorProto.FLOAT:
        raise ModelError("it is rounded to another type")
    return graph.views[node.input[0]]


def _turn(graph: OuterBuilder, node: NodeProto) -> Factored | Moved:
    view = graph.views[node.input[0]]
    order = attributes(node).get("perm", list(reversed(range(len(view.sizes)))))
    if isinstance(view, Factored) and view.b and len(view.sizes) == 2 and list(order) == [1, 0]:
        graph.nodes.append(node)
        return Factored(node.output[0], view.sizes[::-1], view.b, view.a)
    moved = graph.whole(node.input[0])
    turned = graph.add("Transpose", moved.name, perm=[0, *(axis + 1 for axis in order)])
    return Moved(turned, tuple(moved.sizes[axis] for axis in order))


def _arrange(graph: OuterBuilder, node: NodeProto) -> Moved:
    """The same numbers in another shape."""
    sizes = graph.fixed_sizes(node.output[0])
    return Moved(graph.reshape(graph.whole(node.input[0]).name, DIRECTIONS, *sizes), sizes)


def _pick(graph: OuterBuilder, node: NodeProto) -> Moved:
    """Rows that no sample decides, as those of positions."""
    moved, axis = graph.whole(node.input[0]), attributes(node).get("axis", 0)
    picked = graph.add("Gather", moved.name, node.input[1], axis=axis + 1 if axis >= 0 else axis)
    return Moved(picked, graph.fixed_sizes(node.output[0]))


def _compute(graph: OuterBuilder, node: NodeProto) -> Moved:
    """What an operator makes of a weight number by number, such as its square or its multiple."""
    sizes = graph.fixed_sizes(node.output[0])
    operands = [
        graph.reshape(graph.whole(name).name, DIRECTIONS, *_padded(graph.whole(name).sizes, sizes))
        if name in graph.views
        else name
        for name in node.input
    ]
    return Moved(graph.add(node.op_type, *operands, **attributes(node)), sizes)


def _padded(sizes: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes with ones in front, to be as many as those of another tensor."""
    if len(sizes) > len(others):
        raise ModelError("it has more axes than what it meets")
    return (1,) * (len(others) - len(sizes)) + sizes


def attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "PRelu"), _elementwise),
    **dict.fromkeys(("BatchNormalization", "GroupNormalization", "InstanceNormalization"), _normalise_channels),
    "Conv": _convolve,
    "Expand": _repeat,
    "Gather": _look_up,
    "Gemm": _gemm,
    "LayerNormalization": _normalise,
    "MatMul": _multiply,
}

VIEWS: Mapping[str, View] = {
    **dict.fromkeys(("Abs", "Add", "Div", "Exp", "Mul", "Neg", "Pow", "Sigmoid", "Sqrt", "Sub", "Tanh"), _compute),
    **dict.fromkeys(("Identity", "Cast"), _same),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _arrange),
    "Gather": _pick,
    "Transpose": _turn,
}
