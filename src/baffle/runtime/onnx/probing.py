"""What a graph's tensors look like: found by running it, since graphs compute sizes in ways that no reader foresees."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, helper

from baffle.core.samples import Array
from baffle.runtime.onnx.graph import OnnxGraph, replace_all
from baffle.runtime.onnx.model_file import computing
from baffle.runtime.onnx.model_folder import LOGITS, WEIGHT, A, B, Input
from baffle.runtime.onnx.session import open_session, translated

FEW, MORE = 2, 3
"""Samples that a graph is run on: what grows from one to the other is the axis of samples."""

Tensors = Mapping[str, NDArray[Any]]


class Sizes(NamedTuple):
    """A tensor's sizes for FEW samples, and which axis grows with the samples; None if none does. Along that axis there
    may be several numbers of each sample: in `runs` runs, each of which goes through all samples."""

    sizes: tuple[int, ...]
    samples: int | None
    runs: int = 1


class Probe:
    """Runs a graph on made-up samples, and gives every tensor from which its outputs are computed."""

    def __init__(self, model: ModelProto, inputs: Sequence[Input], others: Tensors) -> None:
        model = computing(model, [LOGITS])
        self.nodes = list(model.graph.node)
        self._names = [name for node in self.nodes for name in node.output if name]
        replace_all(model.graph.output, [helper.make_empty_tensor_value_info(name) for name in self._names])
        self._inputs, self._others = inputs, others
        self._taken = [value.name for value in model.graph.input]
        self._session = open_session(model.SerializeToString())

    def run(self, samples: int, changed: int | None = None) -> Tensors:
        """The tensors of a pass of so many samples, one of which may be another than usual."""
        inputs = {wanted.in_graph: made_up(wanted, samples, changed) for wanted in self._inputs} | dict(self._others)
        with translated("a forward pass"):
            outputs = self._session.run(self._names, {name: inputs[name] for name in self._taken})
        return inputs | {name: np.asarray(output) for name, output in zip(self._names, outputs, strict=True)}


def made_up(wanted: Input, samples: int, changed: int | None = None) -> Array:
    """Samples of any numbers; token ids are 1, and 0 in the sample that is another."""
    each = np.random.default_rng(0).normal(size=(samples, *wanted.shape))
    if wanted.dtype != "float32":
        each[:] = 1
    if changed is not None:
        each[changed] = 1 - each[changed]
    return each.astype(wanted.dtype)


def _weights(graph: OnnxGraph) -> dict[str, NDArray[Any]]:
    return {WEIGHT + name: values for name, values in graph.weights.items()}


def sizes_in(graph: OnnxGraph) -> dict[str, Sizes]:
    """The sizes of every tensor. Left out are those that grow with the samples in no simple way."""
    probe = Probe(graph.model, graph.inputs, _weights(graph))
    few, more = probe.run(FEW), probe.run(MORE)
    others = [probe.run(FEW, changed) for changed in range(FEW)]
    found = dict[str, Sizes]()
    for name, tensor in few.items():
        sizes, larger = tensor.shape, more[name].shape
        grown = [axis for axis, pair in enumerate(zip(sizes, larger, strict=False)) if pair[0] != pair[1]]
        if len(sizes) == len(larger) and not grown:
            found[name] = Sizes(sizes, None)
        elif len(sizes) == len(larger) and len(grown) == 1 and sizes[grown[0]] * MORE == larger[grown[0]] * FEW:
            found[name] = Sizes(sizes, grown[0], _runs(tensor, [other[name] for other in others], grown[0]))
    return found


def _runs(tensor: NDArray[Any], others: list[NDArray[Any]], axis: int) -> int:
    """How the numbers of samples alternate along an axis, given the tensor for other samples: the fewest runs that
    explain which numbers changed with which sample."""
    count = tensor.shape[axis] // FEW
    places = np.arange(tensor.shape[axis])
    beside = tuple(other for other in range(tensor.ndim) if other != axis)
    changed = [((tensor != other) & ~((tensor != tensor) & (other != other))).any(axis=beside) for other in others]
    for runs in range(1, count + 1):
        if count % runs == 0:
            owner = places // (count // runs) % FEW
            if not any((mask & (owner != sample)).any() for sample, mask in enumerate(changed)):
                return runs
    return 1


ALIASES = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
"""Operators whose output lies where their input does."""


def row_bytes(outer: ModelProto, graph: OnnxGraph) -> int:
    """About how many bytes the tensors of a graph for many outer directions take for each direction of a sample: the
    most that are needed at a time, if each is freed after its last use."""
    directions = samples = 4
    factors = dict[str, NDArray[Any]]()
    for value in outer.graph.input:
        if value.name.startswith((A, B)):
            size = value.type.tensor_type.shape.dim[1].dim_value
            factors[value.name] = np.zeros((directions, size), np.float32)
    probe = Probe(outer, graph.inputs, _weights(graph) | factors)
    owner, size, last = dict[str, str](), dict[str, int](), dict[str, int]()
    tensors = probe.run(samples)
    for number, node in enumerate(probe.nodes):
        for name in filter(None, node.output):
            owner[name] = owner.get(node.input[0], name) if node.op_type in ALIASES else name
            size[name] = tensors[name].nbytes if owner[name] == name else 0
        last |= {owner[name]: number for name in (*node.input, *node.output) if name in owner}
    held = most = 0
    for number, node in enumerate(probe.nodes):
        held += sum(size[name] for name in node.output if name)
        most = max(most, held)
        held -= sum(size[name] for name, end in last.items() if end == number)
    return max(1, -(-most // (directions * samples)))
