"""Published files of MobileNetV2's weights, read as pairs of weight and bias, whatever a file holds."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from baffle.archives import open_archive, read_array
from baffle.errors import DataError, first_line

Pair = tuple[Tensor, Tensor]
"""A layer's weight and bias."""

MOST_BYTES = 1 << 26
"""Of a file, packed or not. MobileNetV2's have 14 million."""

EPSILON = 1e-5
"""Added to a variance by torchvision's BatchNorm."""


def read_pairs(path: Path) -> list[Pair]:
    """The layers in order, normalisation folded into them: of an npz file, or of torchvision's state dict."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, expected at most {MOST_BYTES:,}")
        pairs = _folded_pairs(path) if path.suffix == ".npz" else _state_dict_pairs(_loaded(path))
        if not pairs or not all(part.ndim for pair in pairs for part in pair):
            raise ValueError("it holds no layers")
    except Exception as fault:  # a hostile file can raise anything that parsing can
        raise DataError(f"{path} is damaged or cannot be read ({first_line(fault)}); download it again") from None
    return pairs


def _loaded(path: Path) -> Mapping[str, Tensor]:
    if zipfile.is_zipfile(path):
        open_archive(path, MOST_BYTES, MOST_BYTES).close()  # torch itself unpacks whatever is declared
    state: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _folded_pairs(path: Path) -> list[Pair]:
    ending = ".weight.npy"
    with open_archive(path, MOST_BYTES, MOST_BYTES) as file:
        names = sorted(name.removesuffix(ending) for name in file.namelist() if name.endswith(ending))
        return [
            (torch.from_numpy(read_array(file, f"{name}.weight")), torch.from_numpy(read_array(file, f"{name}.bias")))
            for name in names
        ]


def _state_dict_pairs(state: Mapping[str, Tensor]) -> list[Pair]:
    """torchvision's layers in order, each BatchNorm folded into the convolution before it."""
    if not isinstance(state, Mapping):
        raise ValueError(f"expected a state dict, got {type(state).__name__}")  # noqa: TRY004
    stems = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    convolutions = [stem for stem in stems if state[f"{stem}.weight"].ndim == 4]
    norms = [stem for stem in stems if f"{stem}.running_var" in state]
    if len(convolutions) != len(norms):
        raise ValueError(f"{len(convolutions)} convolutions but {len(norms)} normalisations")
    pairs = [_folded(state, *both) for both in zip(convolutions, norms, strict=True)]
    return [*pairs, (state["classifier.1.weight"], state["classifier.1.bias"])]


def _folded(state: Mapping[str, Tensor], convolution: str, norm: str) -> Pair:
    scale, shift, mean, variance = (
        state[f"{norm}.{name}"].double() for name in ("weight", "bias", "running_mean", "running_var")
    )
    factor = scale / torch.sqrt(variance + EPSILON)
    weight = state[f"{convolution}.weight"].double() * factor.view(-1, 1, 1, 1)
    return weight.float(), (shift - mean * factor).float()
