"""A runtime in one file: softmax regression in NumPy. Tests add it to the registry as a new runtime is added."""

from typing import ClassVar

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.ports import Batch
from baffle.core.probe import Loss
from baffle.models.inputs import Inputs
from baffle.plan import ModelSettings, Plan, ProbeSettings
from baffle.runtime.model import RunnableModel


class NumpySoftmax(ModelSettings, frozen=True, tag_field="name", tag="numpy-softmax"):
    """Softmax regression, run by NumPy."""

    runtime: ClassVar[str] = "numpy"


class SoftmaxRuntime:
    """The model for one thread: weights of (classes, pixels), then biases."""

    def __init__(self, classes: int) -> None:
        self._classes = classes

    def on(self, batch: Batch) -> Loss:
        def loss(weights: F32) -> float:
            outputs = self._outputs(weights, batch)
            shifted = outputs - outputs.max(axis=1, keepdims=True)
            logarithms = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
            return -float(np.mean(logarithms[np.arange(len(batch.y)), batch.y]))

        return loss

    def outputs(self, weights: F32, batch: Batch) -> F32:
        return self._outputs(weights, batch).astype(np.float32)

    def _outputs(self, weights: F32, batch: Batch) -> F64:
        matrix = weights[: -self._classes].reshape(self._classes, -1).astype(np.float64)
        outputs: F64 = batch.x.reshape(len(batch.y), -1) @ matrix.T + weights[-self._classes :]
        return outputs


class NumpyModel(RunnableModel):
    packages = ("numpy",)

    def __init__(self, settings: ModelSettings, inputs: Inputs) -> None:
        self.settings = settings  # type: ignore[assignment]
        self._inputs = inputs

    def initial_weights(self) -> F32:
        return np.zeros(self._inputs.classes * (int(np.prod(self._inputs.one_shape())) + 1), np.float32)

    def runtime(self, _probe: ProbeSettings, _precision: str) -> SoftmaxRuntime:
        return SoftmaxRuntime(self._inputs.classes)


def load(plan: Plan, inputs: Inputs) -> NumpyModel:
    return NumpyModel(plan.task.model, inputs)
