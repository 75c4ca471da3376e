"""What a measurement is about: a LeNet on MNIST (on the digits in a smoke test), untrained or trained for a while."""

from pathlib import Path

import numpy as np

from baffle.core.arrays import F32
from baffle.core.seeds import batch_indices
from baffle.core.update import adam
from baffle.paper.settings import PRESET
from baffle.paper.target import Scale
from baffle.plan import load
from baffle.runtime.torch.loss import accuracy
from baffle.task.load import Task, load_task

RATE, SAMPLES = 0.01, 32
"""Of a step of training."""


def subject(scale: Scale, data: Path | None, *settings: str) -> Task:
    """The preset of a scale at batch level, as a server and its clients would load it."""
    return load_task(load(PRESET[scale], ["federation.level=batch", *settings]), data)


def trained(task: Task, steps: int) -> F32:
    """Its weights after so many steps of backpropagation: where a run is after a while, without the time of one."""
    weights, runtime = task.initial_weights(), task.runtime()
    step = adam(RATE, 0.9, 0.99)
    state, n = step.init(weights), len(task.source.train)
    for turn in range(steps):
        chosen = batch_indices(lambda lap: lap.to_bytes(32, "big"), n, SAMPLES, turn)
        _, gradient = runtime.gradient_on(task.source.train.batch(chosen))(weights)
        state, change = step.update(state, gradient, weights)
        weights = weights + change
    return weights


def accuracy_of(task: Task, weights: F32, most: int = 1000) -> float:
    """On the first samples of the test set."""
    test = task.source.test
    return accuracy(task.runtime(), weights, test.batch(np.arange(min(most, len(test)))))
