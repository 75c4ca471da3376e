"""How unlike the gradients of a model's layers are, by backpropagation: what the probes of `measure_contrast` are
compared with."""

import numpy as np

from baffle.measuring.precision import Contrast
from baffle.runtime.torch.loss import TorchLoss
from baffle.task.load import Task


def exact_contrast(task: Task) -> Contrast:
    """At the initial weights, on the batch that probes are measured on. Layers without a gradient do not count."""
    runtime = task.runtime()
    assert isinstance(runtime, TorchLoss)
    batch = task.source.train.batch(task.shares[0][: task.plan.federation.batch or None])
    _, gradient = runtime.gradient_on(batch)(task.initial_weights())
    layers = task.model.layers() or ()
    squares = np.array([sum(np.sum(gradient[own] ** 2) for own, _ in layer.parts()) for layer in layers])
    sizes = np.array([layer.size for layer in layers])
    squares, sizes = squares[squares > 0], sizes[squares > 0]
    roots = np.sqrt(squares / sizes)
    excess = squares.sum() / squares * np.sqrt(sizes) / np.sqrt(sizes).sum()
    noise = np.sqrt(np.average(excess, weights=sizes))
    return Contrast(len(layers), float(roots.max() / roots.min()), float(noise))
