"""Files of MobileNetV2's weights with random numbers in them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from baffle.models.mobilenet import mobilenet


def random_pairs(classes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of all layers, as a file might hold them."""
    torch.manual_seed(seed)
    module = mobilenet((3, 32, 32), classes)
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    return [(part.weight.detach(), torch.randn(len(part.weight)) * 0.1) for part in layers]


def save_npz(folder: Path, pairs: list[tuple[Tensor, Tensor]]) -> Path:
    """The pairs as a file of folded layers in a data folder."""
    arrays: dict[str, Any] = {}
    for number, (weight, bias) in enumerate(pairs):
        arrays[f"{number:02}_layer.weight"] = weight.view(*weight.shape, *[1] * (4 - weight.ndim)).numpy()
        arrays[f"{number:02}_layer.bias"] = bias.numpy()
    (folder / "mobilenetv2").mkdir(exist_ok=True)
    path = folder / "mobilenetv2" / "folded.npz"
    np.savez(path, **arrays)
    return path
