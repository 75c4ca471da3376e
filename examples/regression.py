"""A regression: predict numbers instead of classes.

python examples/regression.py

Six clients measured the same physical law, each with instruments of its own range. The model learns it from all of
them; R² says how much of the spread in new measurements it explains.
"""

import numpy as np
import torch
from torch import nn

import baffle


def measurements(count: int, seed: int, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """Two inputs and two outputs of a damped pendulum: how far it is, and how fast, after a time."""
    random = np.random.default_rng(seed)
    time, length = random.uniform(low, high, count), random.uniform(0.5, 2, count)
    swing = np.exp(-time / 4)[:, None] * np.stack([np.cos(time / length), np.sin(time / length)], 1)
    inputs = np.stack([time, length], 1)
    return inputs.astype(np.float32), (swing + random.normal(0, 0.02, (count, 2))).astype(np.float32)


clients = [measurements(300, seed, 0, 1 + seed) for seed in range(6)]
test = measurements(500, 99, 0, 6)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 2))
run = baffle.fit(model, clients, test, loss="mse", metrics=["r2", "mae"], plan={"rounds": 400, "federation.batch": 64})
print(f"R² {run['test_r2']:.3f}, mean error {run['test_mae']:.3f}")
