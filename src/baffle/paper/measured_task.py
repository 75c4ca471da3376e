"""The task that sigma and fig-attack measure: LeNet on MNIST (smoke: on the digits), untrained or trained a little."""

from pathlib import Path

import numpy as np

from baffle.core.arrays import F32
from baffle.core.ports import GradientRuntime
from baffle.core.seeds import batch_indices
from baffle.core.update import adam
from baffle.errors import PlanError
from baffle.paper.settings import PRESET
from baffle.paper.target import Scale
from baffle.plan import load
from baffle.runtime.torch.loss import accuracy
from baffle.task.load import Task, load_task

RATE = 0.01
"""Adam's rate in training."""

SAMPLES = 32
"""Samples in a step of training."""


def measured_task(scale: Scale, data: Path | None, *settings: str) -> Task:
    """The preset of a scale at batch level, loaded as a server and its clients would load it. These measurements
    backpropagate, too."""
    return load_task(load(PRESET[scale], ["federation.level=batch", "run.runtime=torch", *settings]), data)


def gradient_runtime(task: Task, precision: str = "") -> GradientRuntime:
    """A runtime that can backpropagate."""
    runtime = task.runtime(precision)
    if not isinstance(runtime, GradientRuntime):
        raise PlanError("task.model: this measurement backpropagates, and the model's runtime can only run inference")
    return runtime


def trained(task: Task, steps: int) -> F32:
    """The weights after this many steps of backpropagation, which stand for a run that is well under way."""
    weights = task.initial_weights()
    runtime = gradient_runtime(task)
    step = adam(RATE, 0.9, 0.99)
    state = step.init(weights)
    n = len(task.source.train)
    for number in range(steps):
        chosen = batch_indices(lambda epoch: epoch.to_bytes(32, "big"), n, SAMPLES, number)
        _, gradient = runtime.gradient_on(task.source.train.batch(chosen))(weights)
        state, change = step.update(state, gradient, weights)
        weights = weights + change
    return weights


def accuracy_of(task: Task, weights: F32, most: int = 1000) -> float:
    """The share of right answers on the first `most` samples of the test set."""
    test = task.source.test
    return accuracy(task.runtime(), weights, test.batch(np.arange(min(most, len(test)))))
