"""Weights of which zeros stay zero, as a pruned model has them. A mask beside each says where it has numbers; what is
trained at its zeros has no effect."""

from collections.abc import Collection

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from baffle.core.samples import Array
from baffle.runtime.onnx.nodes import copy_of, replace_all

NONZERO, MASK = "/nonzero", "/mask"  # end the names of a trained tensor before its mask, and of the mask


def with_masks(model: ModelProto, names: Collection[str]) -> ModelProto:
    """The model with a mask for each of these weights that has zeros. A vector has none, because a
    bias may begin at zero."""
    model = copy_of(model)
    tensors, masks, nodes = model.graph.initializer, dict[str, Array](), list(model.graph.node)
    for tensor in tensors:
        values = numpy_helper.to_array(tensor)
        if tensor.name in names and values.ndim > 1 and 0 < np.count_nonzero(values) < values.size:
            name, tensor.name = tensor.name, tensor.name + NONZERO
            masks[name + MASK] = (values != 0).astype(values.dtype)
            nodes.insert(0, helper.make_node("Mul", [tensor.name, name + MASK], [name]))
    tensors.extend(numpy_helper.from_array(values, name) for name, values in masks.items())
    replace_all(model.graph.node, nodes)
    return model


def without_masks(model: ModelProto) -> ModelProto:
    """The same model with weights that are zero where their masks are."""
    model = copy_of(model)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    masked = [node for node in model.graph.node if node.input and node.input[0].endswith(NONZERO)]
    for tensor in model.graph.initializer:
        if tensor.name.endswith(NONZERO):
            name = tensor.name.removesuffix(NONZERO)
            kept = np.where(tensors[name + MASK] != 0, tensors[tensor.name], 0)
            tensor.CopyFrom(numpy_helper.from_array(kept.astype(tensors[tensor.name].dtype), name))
    replace_all(model.graph.node, [node for node in model.graph.node if node not in masked])
    replace_all(model.graph.initializer, [each for each in model.graph.initializer if not each.name.endswith(MASK)])
    return model


def zeros_of(model: ModelProto) -> int:
    """How many numbers masks hold at zero."""
    masks = (numpy_helper.to_array(each) for each in model.graph.initializer if each.name.endswith(MASK))
    return sum(int(mask.size - np.count_nonzero(mask)) for mask in masks)
