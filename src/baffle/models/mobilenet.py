"""MobileNetV2 of width one: a sequence of inverted residual blocks, with random or ImageNet weights. Published weights
come in two forms, each with its own conventions for images. TensorFlow's are folded into 53 convolutions with biases;
torchvision's have BatchNorm, which is folded here. Folded weights need no normalisation."""

import zipfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.archives import open_archive, read_array
from baffle.core.pixels import PixelScale
from baffle.errors import DataError, PlanError, first_line
from baffle.models.inputs import UNIT, Inputs
from baffle.models.networks import ACTIVATIONS, normalisation
from baffle.plan import MobileNet

BLOCKS = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
"""Groups of blocks: expansion, channels, number of blocks, stride of the first block."""

FIRST, FEATURES = 32, 1280  # channels of the first convolution, and the number of features that the classifier takes

SMALLEST = 32  # the smallest side of an image in pixels, because it is halved five times

MOST_BYTES = 1 << 26  # the most bytes of a file, packed or unpacked. MobileNetV2's files have 14 million.

EPSILON = 1e-5  # added to a variance by torchvision's BatchNorm

GET_IT = (
    "put mobilenet_v2-*.pth (torchvision's, from download.pytorch.org/models), or an .npz of 53 folded weight/bias "
    "pairs, into a folder mobilenetv2 and give its parent as --data FOLDER or $BAFFLE_DATA, or set "
    'task.model.weights = "random"'
)

Pair = tuple[Tensor, Tensor]  # a layer's weight and bias


class Convention(NamedTuple):
    """How images reached a network in training: the scale of their pixels, and the sides on which they are padded."""

    scale: PixelScale = PixelScale((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # pixels from -1 to 1
    same: bool = False  # TensorFlow's padding: as little as possible, first on the right and at the bottom


TENSORFLOW = Convention(same=True)
TORCHVISION = Convention(PixelScale((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def build_mobilenet(model: MobileNet, inputs: Inputs) -> nn.Module:
    if model.weights == "random":
        module = mobilenet(inputs.one_shape(), inputs.outputs, model.activation, model.norm, scale=inputs.scale)
    elif inputs.scale is None:
        raise PlanError(
            "task.model: ImageNet's weights need to know how pixels are scaled: expected values in [0, 1] from "
            "task.data, or a baffle.Source with scale = PixelScale(mean, deviation) such that value · deviation + "
            "mean is in [0, 1]; got other values"
        )
    else:
        module = pretrained_mobilenet(inputs.one_shape(), inputs.outputs, inputs.folder, inputs.scale)
    return freeze_front(module) if model.trained == "head" else module


class Pixels(nn.Module):
    """Converts a data set's values, grey or colour, to the scale that the network was trained on. It does so in one
    step, so that values already on the right scale keep every bit."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, wanted: PixelScale, applied: PixelScale) -> None:
        super().__init__()
        self.rest = wanted.after(applied)
        self.register_buffer("mean", torch.tensor(self.rest.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(self.rest.deviation).view(-1, 1, 1), persistent=False)

    def extra_repr(self) -> str:
        return f"mean={self.rest.mean}, deviation={self.rest.deviation}"

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation  # broadcasting repeats a single channel


class Same(nn.Module):
    """Pads an image with zeros as TensorFlow does for a 3 × 3 convolution with stride two."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (x.shape[-1] % 2, 1, x.shape[-2] % 2, 1))


class Block(nn.Module):
    """An inverted residual: widen, convolve each channel separately, narrow. The input is added if shapes allow."""

    def __init__(
        self, before: int, after: int, expansion: int, stride: int, activation: str, norm: str, same: bool
    ) -> None:
        super().__init__()
        wide = before * expansion
        self.branch = nn.Sequential(
            *(layer(before, wide, 1, 1, norm, activation) if expansion > 1 else []),
            *layer(wide, wide, 3, stride, norm, activation, groups=wide, same=same),
            *layer(wide, after, 1, 1, norm),
        )
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.branch(x)
        return x + output if self.adds else output


def layer(
    into: int, out: int, size: int, stride: int, norm: str, activation: str = "", groups: int = 1, same: bool = False
) -> list[nn.Module]:
    """A padded convolution, optionally followed by a normalisation and an activation."""
    uneven = same and stride == 2
    parts: list[nn.Module] = [Same()] if uneven else []
    parts.append(nn.Conv2d(into, out, size, stride, padding=0 if uneven else size // 2, groups=groups))
    parts += [normalisation(norm, out)] if norm != "none" else []
    return [*parts, ACTIVATIONS[activation]()] if activation else parts


def mobilenet(
    shape: tuple[int, ...],
    classes: int,
    activation: str = "relu6",
    norm: str = "none",
    convention: Convention | None = None,
    scale: PixelScale | None = None,
) -> nn.Sequential:
    """2,206,816 random weights before the classifier, and 1,281 per class in it. `scale` is that of the images."""
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape[1:]) < SMALLEST:
        raise PlanError(
            f"task.model: a mobilenet takes images of 1 or 3 channels and at least {SMALLEST} × {SMALLEST} pixels, "
            f"got samples of shape {shape}"
        )
    convention = convention or Convention()
    width = FIRST
    blocks = list[nn.Module]()
    for expansion, channels, count, stride in BLOCKS:
        for number in range(count):
            block_stride = stride if number == 0 else 1
            blocks.append(Block(width, channels, expansion, block_stride, activation, norm, convention.same))
            width = channels
    module = nn.Sequential(
        Pixels(convention.scale, scale or UNIT),
        *layer(3, FIRST, 3, 2, norm, activation, same=convention.same),
        *blocks,
        *layer(width, FEATURES, 1, 1, norm, activation),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(FEATURES, classes),
    )
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight)
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.01)
        if isinstance(part, nn.Conv2d | nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    return module


def pretrained_mobilenet(
    shape: tuple[int, ...], classes: int, folder: Path | None, scale: PixelScale | None = None
) -> nn.Sequential:
    """A network with ImageNet's weights and a classifier of zeros, so that all classes are equally likely."""
    pretrained = read_weights(find_weights(folder))
    module = mobilenet(shape, classes, convention=pretrained.convention, scale=scale)
    *_, head = module
    assert isinstance(head, nn.Linear)
    nn.init.zeros_(head.weight)
    with torch.no_grad():
        for part, (weight, bias) in zip(_convolutions(module), pretrained.convolutions, strict=True):
            assert part.bias is not None
            part.weight.copy_(weight)
            part.bias.copy_(bias)
    return module


def freeze_front(module: nn.Sequential) -> nn.Sequential:
    """Freeze all layers except the last."""
    module.requires_grad_(False)
    module[-1].requires_grad_(True)
    return module


def find_weights(folder: Path | None) -> Path:
    """The file of weights in a data folder."""
    if folder is None:
        raise DataError(f"MobileNetV2's weights are not part of BAFFLE: {GET_IT}")
    for pattern in ("mobilenetv2/*.npz", "mobilenetv2/mobilenet_v2-*.pth", "mobilenet_v2-*.pth"):
        if paths := sorted(folder.glob(pattern)):
            return paths[0]
    raise DataError(f"no weights of MobileNetV2 in {folder}: {GET_IT}")


class Pretrained(NamedTuple):
    """The weights in a file: 52 convolutions in order, and ImageNet's classifier."""

    convolutions: tuple[Pair, ...]
    classifier: Pair
    convention: Convention


def read_weights(path: Path) -> Pretrained:
    try:
        changed = path.stat().st_mtime_ns
    except OSError as fault:
        raise DataError(f"{path} cannot be read ({fault.strerror}); download it again") from None
    return _read(path, changed)


@lru_cache(maxsize=1)  # every thread builds its model from the same file
def _read(path: Path, _changed: int) -> Pretrained:
    pairs = _pairs(path)
    expected = [tuple(part.weight.shape) for part in _convolutions(mobilenet((3, SMALLEST, SMALLEST), 1))]
    *convolutions, (weight, bias) = pairs
    shapes = [tuple(weight.shape) for weight, _ in convolutions]
    if shapes != expected or weight.shape[1:].numel() != FEATURES or any(len(w) != len(b) for w, b in pairs):
        raise DataError(
            f"{path} is not a MobileNetV2 of width one: expected {len(expected)} convolutions of its shapes and a "
            f"classifier of {FEATURES} features, got {len(shapes)} convolutions; {GET_IT}"
        )
    if not all(bool(torch.isfinite(part).all()) for pair in pairs for part in pair):
        raise DataError(f"{path} holds weights that are not finite numbers; download it again")
    convention = TENSORFLOW if path.suffix == ".npz" else TORCHVISION
    return Pretrained(tuple(convolutions), (weight.flatten(1), bias), convention)


def _convolutions(module: nn.Module) -> Sequence[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d)]


def _pairs(path: Path) -> list[Pair]:
    """The layers of a file in order, normalisation folded into them. The file may be damaged or hostile."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, expected at most {MOST_BYTES:,}")
        pairs = _folded_pairs(path) if path.suffix == ".npz" else _state_dict_pairs(path)
        if not pairs or not all(part.ndim for pair in pairs for part in pair):
            raise ValueError("it holds no layers")
    except Exception as fault:  # a hostile file can raise anything that parsing can
        raise DataError(f"{path} is damaged or cannot be read ({first_line(fault)}); download it again") from None
    return pairs


def _folded_pairs(path: Path) -> list[Pair]:
    ending = ".weight.npy"
    with open_archive(path, MOST_BYTES, MOST_BYTES) as file:
        names = sorted(name.removesuffix(ending) for name in file.namelist() if name.endswith(ending))
        return [
            (torch.from_numpy(read_array(file, f"{name}.weight")), torch.from_numpy(read_array(file, f"{name}.bias")))
            for name in names
        ]


def _state_dict_pairs(path: Path) -> list[Pair]:
    """torchvision's layers in order, each BatchNorm folded into the convolution before it."""
    if zipfile.is_zipfile(path):
        open_archive(path, MOST_BYTES, MOST_BYTES).close()  # torch itself unpacks whatever is declared
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise ValueError(f"expected a state dict, got {type(state).__name__}")  # noqa: TRY004
    stems = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    convolutions = [stem for stem in stems if state[f"{stem}.weight"].ndim == 4]
    norms = [stem for stem in stems if f"{stem}.running_var" in state]
    if len(convolutions) != len(norms):
        raise ValueError(f"{len(convolutions)} convolutions but {len(norms)} normalisations")
    pairs = list[Pair]()
    for convolution, norm in zip(convolutions, norms, strict=True):
        parts = ("weight", "bias", "running_mean", "running_var")
        scale, shift, mean, variance = (state[f"{norm}.{name}"].double() for name in parts)
        factor = scale / torch.sqrt(variance + EPSILON)
        weight = state[f"{convolution}.weight"].double() * factor.view(-1, 1, 1, 1)
        pairs.append((weight.float(), (shift - mean * factor).float()))
    return [*pairs, (state["classifier.1.weight"], state["classifier.1.bias"])]
