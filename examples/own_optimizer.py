"""Train with an optimizer of your own: Lion, whose every step is one of ± rate for each weight.

    python examples/own_optimizer.py

The plan names it as "own_optimizer:lion" and keeps the hash of this file. It computes with elementwise float32 alone,
so everybody who replays the run gets the same weights.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import baffle


def lion(rate: float, betas: tuple[float, float]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What makes the state before the first step, and what makes a step from state, gradient and weights."""
    near, far = map(np.float32, betas)
    one, down = np.float32(1), np.float32(-rate)

    def init(weights: np.ndarray) -> tuple[np.ndarray]:
        return (np.zeros_like(weights),)

    def update(state: Any, gradient: np.ndarray, _weights: np.ndarray) -> tuple[Any, np.ndarray]:
        (mean,) = state
        blend = near * mean + (one - near) * gradient
        return (far * mean + (one - far) * gradient,), down * np.sign(blend)

    return init, update


if __name__ == "__main__":
    settings = {"rounds": 60, "update.optimizer": "own_optimizer:lion", "update.rate": 0.003}
    summary = baffle.simulate(baffle.load_plan("digits-head", settings), "runs/lion")
    verified = baffle.verify("runs/lion", own_code=True)
    assert verified.weights_sha256 == summary["weights_sha256"]
    print(f"accuracy {summary['test_accuracy']:.1%}")
