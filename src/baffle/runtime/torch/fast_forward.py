"""A faster forward pass of a module on a CPU: the same output up to rounding, thanks to a better memory layout."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.freed_memory import keep_freed_memory
from baffle.runtime.torch import winograd
from baffle.runtime.torch.tensors import Inputs, call, only_tensor

Form = Callable[[Tensor], Tensor]

PIXELS = 100  # smaller images run unchanged: on the 8 × 8 digits, group normalisation loses more than convolutions gain

AT_ONCE = 2 << 20
"""A layer that needs copies or intermediate tensors runs on as many samples together as have this many output bytes."""

IN_PLACE: dict[type[nn.Module], Form] = {
    nn.Hardswish: lambda x: F.hardswish(x, inplace=True),
    nn.ReLU: torch.relu_,
    nn.ReLU6: lambda x: F.relu6(x, inplace=True),
    nn.SELU: torch.selu_,
    nn.Tanh: torch.tanh_,
    nn.Sigmoid: torch.sigmoid_,
}
"""Activations without settings, each with a function that overwrites its input."""

FRESH = (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.BatchNorm2d)
"""Layers whose output is always a new tensor, so the next layer may overwrite it."""


class FastForward:
    """Runs a module on images stored pixel by pixel ("channels last"), with some layers replaced by faster forms.
    Between two calls the module is unchanged. A module that relies on the usual memory layout, for example by calling
    `view`, fails like this. After its first failure it runs unchanged."""

    def __init__(self, module: nn.Module, plain: bool = False) -> None:
        self._module = module
        self._forms = {layer: form for layer in module.modules() if (form := _form(layer))}
        self._plain = plain or not self._forms
        sequences = [part for part in module.modules() if type(part) is nn.Sequential and "forward" not in vars(part)]
        self._forms |= {part: partial(_in_sequence, _steps(part)) for part in sequences}
        keep_freed_memory()

    def __call__(self, x: Inputs) -> Tensor:
        if not isinstance(x, Tensor):
            return call(self._module, x)
        if self._suits(x):
            try:
                # Channels last: neighbours in memory are the channels of one pixel, so their stride is 1.
                with _installed(self._forms):
                    return only_tensor(self._module(x if x.stride(1) == 1 else self.arranged(x)))
            except RuntimeError:
                output = only_tensor(self._module(x.contiguous()))
                self._plain = True
                return output
        return only_tensor(self._module(x.contiguous()))

    def arranged(self, x: Inputs) -> Inputs:
        """Samples in the memory layout that suits this module best."""
        if not isinstance(x, Tensor) or not self._suits(x):
            return x
        # With a single channel both layouts look alike, and `contiguous` would keep the present one.
        return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)

    def _suits(self, x: Tensor) -> bool:
        return not self._plain and x.ndim == 4 and x.shape[2] * x.shape[3] >= PIXELS


@contextmanager
def _installed(forms: dict[nn.Module, Form]) -> Iterator[None]:
    for layer, form in forms.items():
        vars(layer)["forward"] = form
    try:
        yield
    finally:
        for layer in forms:
            del vars(layer)["forward"]


def _form(layer: nn.Module) -> Form | None:
    """The faster form of a layer, or None. A subclass may compute anything, so it has none."""
    if "forward" in vars(layer):
        return None
    if type(layer) is nn.Conv2d:
        # Channels last is faster except for large filters with many outputs (measured with oneDNN 3.12 and AVX2).
        large = min(layer.kernel_size) >= 5 and layer.out_channels >= 32
        direct = partial(_convolve, layer, torch.contiguous_format if large else torch.channels_last)
        if not winograd.suits(layer):
            return direct
        return lambda x: winograd.convolve(layer, x) if winograd.takes(layer, x) else direct(x)
    return partial(_max_pool, size) if (size := tile_size(layer)) else None


def _convolve(layer: nn.Conv2d, layout: torch.memory_format, x: Tensor) -> Tensor:
    if x.ndim != 4 or layout == torch.channels_last:
        return nn.Conv2d.forward(layer, x.contiguous(memory_format=layout) if x.ndim == 4 else x)
    # In this layout oneDNN copies input and output.
    sample_bytes = layer.out_channels * x[0, 0].nbytes // math.prod(layer.stride)
    return _in_pieces(lambda piece: nn.Conv2d.forward(layer, piece.contiguous()), x, sample_bytes)


def _in_pieces(form: Form, x: Tensor, sample_bytes: int) -> Tensor:
    """Apply a form to a few samples at a time, to save memory. A sample's output has about `sample_bytes`."""
    pieces = torch.split(x, max(1, AT_ONCE // max(1, sample_bytes)))
    first = form(pieces[0])
    if len(pieces) == 1:
        return first
    layout = torch.channels_last if first.stride(1) == 1 else torch.contiguous_format
    output = torch.empty((len(x), *first.shape[1:]), dtype=x.dtype, memory_format=layout)
    targets = torch.split(output, len(pieces[0]))
    targets[0].copy_(first)
    for piece, target in zip(pieces[1:], targets[1:], strict=True):
        target.copy_(form(piece))
    return output


Step = tuple[nn.Module, Form | None, nn.Module]
"""A layer of a sequence, what overwrites its input in place (None if others may see it), and what made that input."""


def _steps(sequence: nn.Sequential) -> list[Step]:
    steps = list[Step]()
    producer: nn.Module = sequence[:0]
    for layer in sequence:
        unchanged = "forward" not in vars(layer)
        in_place = IN_PLACE.get(type(layer)) if unchanged and type(producer) in FRESH else None
        steps.append((layer, in_place, producer))
        if type(layer) is not nn.Identity and not in_place:
            producer = layer
    return steps


def _in_sequence(steps: list[Step], x: Tensor) -> Tensor:
    """Run a sequence layer by layer. Layers with hooks are not run in place, so a hook sees what it always sees."""
    for layer, in_place, producer in steps:
        x = in_place(x) if in_place and not _has_hooks(layer) and not _has_hooks(producer) else layer(x)
    return x


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _max_pool(size: int, x: Tensor) -> Tensor:
    if x.ndim != 4 or min(x.shape[-2:]) < size:
        return F.max_pool2d(x, size)  # handles it, or says what is wrong
    return _in_pieces(partial(max_of_tiles, size), x, x[0].nbytes // size**2)


def tile_size(layer: nn.Module) -> int:
    """The size of the square tiles of which a layer takes the maximum; 0 if it does something else."""
    if type(layer) is not nn.MaxPool2d or not isinstance(layer.kernel_size, int) or layer.stride != layer.kernel_size:
        return 0
    others = (layer.padding, layer.dilation, layer.return_indices, layer.ceil_mode)
    return layer.kernel_size if others == (0, 1, False, False) else 0


def max_of_tiles(size: int, x: Tensor) -> Tensor:
    """The maximum of each tile, without the positions that torch's pooling also computes."""
    rows, columns = (length // size * size for length in x.shape[-2:])
    x = reduce(torch.maximum, [x[..., start:rows:size, :] for start in range(size)])
    return reduce(torch.maximum, [x[..., start:columns:size] for start in range(size)])
