"""ONNX graphs as clients run them: weights are inputs, the mean loss is an output if the graph holds a loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from msgspec import UNSET

from baffle.core.arrays import F32
from baffle.core.state import FLOAT
from baffle.plan import Plan
from baffle.runtime.onnx import model_folder
from baffle.runtime.onnx.model_folder import CROSS_ENTROPY, GraphLoss, HeadTensors, Input
from baffle.runtime.onnx.tensor_file import Stored

PREFIX = "inner/"  # prefix of every name in the original model, so that none clashes with a name that is added


class ShownHead(NamedTuple):
    """The names of what a last linear layer takes and gives, and of its tensors."""

    inputs: str
    outputs: str
    tensors: HeadTensors


@dataclass(frozen=True)
class OnnxGraph:
    """A finished graph, its original weights, and the shapes and types of its samples and outputs. A graph made from a
    module also has the rest of the module's state dict: `frozen` holds everything that is not trained; `tied` maps the
    name of a weight in `weights` to its further names. A graph that another tool made has the layer of each weight,
    because its names need not tell. A graph that may
    serve plans of another with the same weights has the SHA-256 of that, `instead_of`."""

    model: bytes
    opset: int
    weights: Mapping[str, F32]
    inputs: tuple[Input, ...]
    classes: int
    frozen: Mapping[str, Stored] = field(default_factory=dict)
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loss: GraphLoss = CROSS_ENTROPY
    label_shape: tuple[int, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    head: HeadTensors | None = None
    instead_of: str = ""

    def flat(self) -> F32:
        """The original weights as one vector."""
        return np.concatenate([values.reshape(-1) for values in self.weights.values()])

    def manifest(self, weights: F32, rounds: int = 0, plan: Plan | None = None) -> model_folder.Manifest:
        """Describes this graph with these weights."""
        several = len(self.inputs) > 1
        return model_folder.Manifest(
            format=model_folder.SEVERAL_ARRAYS if several else model_folder.ONE_ARRAY,
            weights=tuple(
                model_folder.Tensor(name, values.shape, self.tied.get(name, ()), self.layers.get(name, ""))
                for name, values in self.weights.items()
            ),
            n_weights=sum(values.size for values in self.weights.values()),
            input_shape=() if several else self.inputs[0].shape,
            input_dtype="float32" if several else self.inputs[0].dtype,
            inputs=self.inputs if several else (),
            classes=self.classes,
            label_shape=self.label_shape,
            loss=self.loss,
            opset=self.opset,
            rounds=rounds,
            model_sha256=sha256(self.model).hexdigest(),
            weights_sha256=sha256(weights.astype(FLOAT).tobytes()).hexdigest(),
            trajectory=plan.trajectory_digest().hex() if plan else "",
            architecture=plan.model_digest().hex() if plan else "",
            head=self.head,
            instead_of=self.instead_of or UNSET,
        )
