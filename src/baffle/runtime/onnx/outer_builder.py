"""A graph for many outer directions under construction: its tensors have a row for each direction and sample."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from baffle.errors import ModelError
from baffle.runtime.onnx.model_folder import Input
from baffle.runtime.onnx.probing import Sizes

DIRECTIONS, SAMPLES = "outer/directions", "outer/samples"
"""Among the sizes of a reshape: how many directions, and how many samples of each, there are."""


class Factored(NamedTuple):
    """A weight tensor as the graph has it, and the factors of what directions add to it; `b` is empty for a vector."""

    name: str
    sizes: tuple[int, ...]
    a: str
    b: str


class Moved(NamedTuple):
    """A tensor that is computed from a weight alone, as each direction has it: directions × its sizes."""

    name: str
    sizes: tuple[int, ...]


class OuterBuilder:
    """Adds nodes, and knows each tensor of the model in its new form.

    What depends on samples alone exists twice: under its own name with a row for each direction and sample, and once
    for all directions. `views` are the weights, and what is computed from one of them alone.
    """

    def __init__(self, inputs: tuple[Input, ...], views: Mapping[str, Factored], sizes: Mapping[str, Sizes]) -> None:
        self.nodes = list[NodeProto]()
        self.constants = list[TensorProto]()
        self.views: dict[str, Factored | Moved] = dict(views)
        self.once = dict[str, str]()
        """The names under which tensors are the same for all directions."""
        self._sizes = sizes
        self._names = dict[tuple[str, tuple[int, ...], bytes], str]()
        self._shapes = dict[tuple[int | str, ...], str]()
        self._rows = dict[str, str]()
        self._wholes = dict[str, Moved]()
        for name, counted in ((DIRECTIONS, next(iter(views.values())).a), (SAMPLES, inputs[0].in_graph)):
            first = self.constant(np.zeros(1, np.int64))
            self.nodes.append(helper.make_node("Gather", [self.add("Shape", counted), first], [name]))
        for wanted in inputs:
            wide = self.add("Expand", wanted.in_graph, self.shape(DIRECTIONS, SAMPLES, *wanted.shape))
            self._rows[wanted.in_graph] = self.reshape(wide, -1, *wanted.shape)
            self.once[wanted.in_graph] = wanted.in_graph

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """A node; its output."""
        name = f"outer/{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, values: NDArray[Any]) -> str:
        key = (values.dtype.str, values.shape, values.tobytes())
        if key not in self._names:
            self._names[key] = f"outer/constant/{len(self._names)}"
            self.constants.append(numpy_helper.from_array(values, self._names[key]))
        return self._names[key]

    def shape(self, *sizes: int | str) -> str:
        """A tensor of sizes, some of which may be known only when the graph runs."""
        if sizes not in self._shapes:
            parts = [size if isinstance(size, str) else self.constant(np.array([size], np.int64)) for size in sizes]
            static = all(isinstance(size, int) for size in sizes)
            whole = self.constant(np.array(sizes, np.int64)) if static else self.add("Concat", *parts, axis=0)
            self._shapes[sizes] = whole
        return self._shapes[sizes]

    def reshape(self, tensor: str, *sizes: int | str) -> str:
        return self.add("Reshape", tensor, self.shape(*sizes))

    def unsqueeze(self, tensor: str, axis: int) -> str:
        return self.add("Unsqueeze", tensor, self.constant(np.array([axis], np.int64)))

    def rows(self, tensor: str) -> str:
        """The name under which a tensor has a row for each direction and sample."""
        return self._rows.get(tensor, tensor)

    def has_samples(self, tensor: str) -> bool:
        found = self._sizes.get(tensor)
        return found is None or found.samples is not None

    def sizes(self, tensor: str) -> tuple[tuple[int, ...], int]:
        """A tensor's sizes, and which axis is that of the samples."""
        sizes, samples, runs = self._grown(tensor)
        if runs > 1:
            raise ModelError(f"{tensor} mixes samples along an axis")
        return sizes, samples

    def sizes_apart(self, tensor: str) -> tuple[tuple[int, ...], int]:
        """The sizes of a tensor, reshaped so that samples have an axis of their own, and which it is."""
        sizes, samples, runs = self._grown(tensor)
        return (*sizes[:samples], *[runs] * (runs > 1), -1, *sizes[samples + 1 :]), samples + (runs > 1)

    def _grown(self, tensor: str) -> tuple[tuple[int, ...], int, int]:
        found = self._sizes.get(tensor)
        if found is None or found.samples is None:
            raise ModelError(f"{tensor} has no axis of samples")
        return found.sizes, found.samples, found.runs

    def fixed_sizes(self, tensor: str) -> tuple[int, ...]:
        """The sizes of a tensor that does not depend on samples."""
        found = self._sizes.get(tensor)
        if found is None or found.samples is not None:
            raise ModelError(f"{tensor} grows with the samples")
        return found.sizes

    def with_rows(self, result: str, tensor: str) -> str:
        """A result in the sizes of one of the model's tensors, with a row for each direction and sample."""
        sizes, samples, _ = self._grown(tensor)
        return self.reshape(result, *sizes[:samples], -1, *sizes[samples + 1 :])

    def factored(self, tensor: str) -> Factored:
        """A matrix with its factors."""
        view = self.views.get(tensor)
        if not isinstance(view, Factored) or not view.b:
            raise ModelError(f"{tensor} is no matrix of weights")
        return view

    def whole(self, tensor: str) -> Moved:
        """A weight, or what is computed from it, as each direction has it."""
        view = self.views[tensor]
        if isinstance(view, Moved):
            return view
        if tensor not in self._wholes:
            added = self.add("Mul", self.unsqueeze(view.a, 2), self.unsqueeze(view.b, 1)) if view.b else view.a
            moved = self.add("Add", view.name, self.reshape(added, DIRECTIONS, *view.sizes))
            self._wholes[tensor] = Moved(moved, view.sizes)
        return self._wholes[tensor]
