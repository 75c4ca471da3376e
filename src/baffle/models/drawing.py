"""Initial weights that are the same on every runtime and machine (`task.init = "numpy"`). A layer starts as PyTorch
starts one by default: weights and biases are uniform between ±1/√(inputs of a unit). The numbers come from the plan's
seed by the stream that directions come from, not from a library's generator."""

from collections.abc import Mapping
from math import prod, sqrt

import numpy as np

from baffle.core.arrays import F32
from baffle.core.seeds import BLOCK, Seeds, keystream

Shapes = Mapping[str, tuple[int, ...]]
"""The trained tensors of a model in the order of the flat vector: "layer.weight", and "layer.bias" if it has one."""

RANDOM_BYTES = 4  # bytes of the stream for each number


def draw_weights(shapes: Shapes, seed: int) -> F32:
    """The initial weights of a model as one flat vector."""
    tensors = [_draw(shapes, name, Seeds(seed, b"").key("init", number)) for number, name in enumerate(shapes, 1)]
    return np.concatenate(tensors)


def _draw(shapes: Shapes, name: str, key: bytes) -> F32:
    layer = name.rpartition(".")[0]
    inputs = prod(shapes[f"{layer}.weight"][1:])
    count = prod(shapes[name])
    stream = keystream(key, range(1), 0, -(-count * RANDOM_BYTES // BLOCK))
    numbers = stream.view("<u4")[0, :count].astype(np.float64)
    return ((numbers + 0.5) * 2.0**-31 - 1).astype(np.float32) * np.float32(1 / sqrt(inputs))
