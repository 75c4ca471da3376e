"""Your model, your data, one call. Written as cells: run it whole, or cell by cell in a notebook.

python examples/own_model.py
"""

# %% Data: whatever you have as arrays or tensors. Here, four clients draw points from two spirals.
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import baffle


def spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count)
    along = random.uniform(0.5, 3, count)
    angle = 2 * along + np.pi * labels
    points = np.stack([along * np.cos(angle), along * np.sin(angle)], 1) + random.normal(0, 0.1, (count, 2))
    return points.astype(np.float32), labels


clients = [spirals(200, seed) for seed in range(4)]
test = spirals(500, seed=99)

# %% Model: any nn.Module.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


# %% Train with forward passes alone. A callback sees every round, and ends the run by returning True.
def good_enough(now: Mapping[str, Any]) -> bool:
    return bool(now.get("test_accuracy", 0) > 0.98)


run = baffle.fit(model, clients, test, plan={"rounds": 400, "federation.batch": 64}, callbacks=[good_enough])

# %% What came out: a summary, arrays, and a trained copy of the module.
print(f"accuracy {run['test_accuracy']:.1%} after {run['rounds']} rounds, {run['forwards']:,} forward passes")
print("loss of the first and the last round:", run.metrics["loss"][[0, -1]])
print("predictions:", run.predict(test[0][:5]).argmax(1), "labels:", test[1][:5])
torch.save(run.model.state_dict(), run.path / "trained.pt")
