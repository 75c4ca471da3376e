"""The steps of one round, from the gradient of each to the weights after it.

A client walks along gradients that it rebuilds from its own encoded vectors, the run along their means over clients. An
update that is linear in the gradient, and in the weights, makes the run's weights the mean of the clients'. Optimizers
that are not linear have a frozen update, which is (see `Transform`). A round of one step takes the usual one.
"""

import numpy as np

from baffle.core.arrays import F32
from baffle.core.update import State, Transform


class Walk:
    """The weights and the optimizer's state within a round, whose steps are multiplied by `share`."""

    def __init__(self, optimizer: Transform, state: State, weights: F32, steps: int, share: np.float32) -> None:
        self.state, self.weights, self._share = state, weights, share
        self._update = optimizer.update if steps == 1 else optimizer.frozen(state)

    def step(self, gradient: F32) -> None:
        self.state, change = self._update(self.state, gradient, self.weights)
        self.weights = self.weights + scaled(change, self._share)


def scaled(change: F32, share: np.float32) -> F32:
    """A step with the rate that its round has."""
    return change if share == 1 else change * share
