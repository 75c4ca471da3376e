"""A loss without a derivative: train on the number that counts, not on a stand-in for it.

python examples/loss_without_derivative.py

A model that reads sequences of digits is judged by edit distance: how many insertions, deletions and replacements lead
from its reading to the truth. No gradient of that exists. Forward passes need none.
"""

import numpy as np
import torch
from torch import nn

import baffle

DIGITS, LENGTH = 4, 6


def readings(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy signals of six digits each."""
    random = np.random.default_rng(seed)
    digits = random.integers(0, DIGITS, (count, LENGTH))
    signal = np.eye(DIGITS)[digits] + random.normal(0, 0.3, (count, LENGTH, DIGITS))
    mixed = signal @ np.random.default_rng(0).normal(0, 1, (DIGITS, 8))
    return mixed.astype(np.float32), digits


def edit_distances(outputs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The edit distance between each reading and its truth, as a share of the length."""
    read, true = outputs.argmax(-1).numpy(), truth.numpy()
    row = np.tile(np.arange(LENGTH + 1), (len(read), 1))
    for i in range(LENGTH):
        above, row = row, np.empty_like(row)
        row[:, 0] = i + 1
        for j in range(LENGTH):
            replaced = above[:, j] + (read[:, i] != true[:, j])
            row[:, j + 1] = np.minimum(replaced, 1 + np.minimum(above[:, j + 1], row[:, j]))
    return torch.from_numpy(row[:, -1] / LENGTH)


torch.manual_seed(0)
model = nn.Linear(8, DIGITS)
clients, test = [readings(100, seed) for seed in range(1, 6)], readings(300, 99)
plan = {"rounds": 150, "probe.sigma": 0.3, "federation.batch": 0, "update.rate": 0.05}
run = baffle.fit(model, clients, test, loss=edit_distances, metrics=["loss", "accuracy"], plan=plan)
print(f"edit distance {run['test_loss']:.3f} of the length; {run['test_accuracy']:.1%} of the digits right")
