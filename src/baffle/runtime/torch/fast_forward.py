"""A module's forward pass in a quicker form on a CPU: the same output to rounding, from a better order in memory."""

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, reduce
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.runtime.torch import winograd

Form = Callable[[Tensor], Tensor]

PIXELS = 100
"""Smaller images run plainly: on the 8 × 8 digits, group normalisation loses more than convolutions gain."""

AT_ONCE = 2 << 20
"""Bytes of output of a layer that needs copies, or a tensor in between: as many samples go through it together."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, KEPT = -1, -3, 1 << 18
"""glibc's names for the size from which on freed memory is given back, and a small one."""

IN_PLACE: dict[type[nn.Module], Form] = {
    nn.Hardswish: lambda x: F.hardswish(x, inplace=True),
    nn.ReLU: torch.relu_,
    nn.ReLU6: lambda x: F.relu6(x, inplace=True),
    nn.SELU: torch.selu_,
    nn.Tanh: torch.tanh_,
    nn.Sigmoid: torch.sigmoid_,
}
"""Modules without settings that need no second tensor."""

FRESH = (nn.Conv2d, nn.Linear, nn.GroupNorm, nn.BatchNorm2d)
"""Layers whose output is a tensor of its own."""


class Quick:
    """Runs a module with its images stored channel by channel of each pixel ("channels last") and with some layers in
    a quicker form. Between two calls the module is as it was.

    A module that relies on the usual order, as `view` does, fails then; from its first failure on it runs as it is.
    """

    def __init__(self, module: nn.Module, plain: bool = False) -> None:
        self._module = module
        self._forms = {layer: form for layer in module.modules() if (form := _form(layer))}
        self._plain = plain or not self._forms
        self._forms |= {part: partial(_in_sequence, _steps(part)) for part in module.modules() if _is_sequence(part)}
        keep_freed_memory()

    def __call__(self, x: Tensor) -> Tensor:
        if self._suits(x):
            try:
                # The usual order has a whole image between two channels, this one nothing.
                return self._run(x if x.stride(1) == 1 else self.arranged(x))
            except RuntimeError:
                output = self._run_plainly(x)
                self._plain = True
                return output
        return self._run_plainly(x)

    def arranged(self, x: Tensor) -> Tensor:
        """Samples in the order in memory in which this module takes them best."""
        if not self._suits(x):
            return x
        # With a single channel two orders look alike, and `contiguous` would leave the other one.
        return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)

    def _suits(self, x: Tensor) -> bool:
        return not self._plain and x.ndim == 4 and x.shape[2] * x.shape[3] >= PIXELS

    def _run(self, x: Tensor) -> Tensor:
        with _installed(self._forms):
            output: Tensor = self._module(x)
            return output

    def _run_plainly(self, x: Tensor) -> Tensor:
        output: Tensor = self._module(x.contiguous())
        return output


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
    """The quicker form of a layer, where there is one. A subclass may do anything, so it has none."""
    if "forward" in vars(layer):
        return None
    if type(layer) is nn.Conv2d:
        directly = partial(_convolve, layer, _order(layer))
        return partial(_convolve_with_less, layer, directly) if winograd.suits(layer) else directly
    if type(layer) is nn.MaxPool2d:
        simple = (layer.padding, layer.dilation, layer.return_indices, layer.ceil_mode) == (0, 1, False, False)
        if simple and isinstance(layer.kernel_size, int) and layer.stride == layer.kernel_size:
            return partial(_pool, layer.kernel_size)
    return None


def _convolve_with_less(layer: nn.Conv2d, directly: Form, x: Tensor) -> Tensor:
    return winograd.convolve(layer, x) if winograd.takes(layer, x) else directly(x)


def _order(layer: nn.Conv2d) -> torch.memory_format:
    """Channels last is quicker, but for large filters with many outputs (measured, oneDNN 3.12 with AVX2)."""
    large = min(layer.kernel_size) >= 5 and layer.out_channels >= 32
    return torch.contiguous_format if large else torch.channels_last


def _convolve(layer: nn.Conv2d, order: torch.memory_format, x: Tensor) -> Tensor:
    if x.ndim != 4 or order == torch.channels_last:
        return nn.Conv2d.forward(layer, x.contiguous(memory_format=order) if x.ndim == 4 else x)
    # oneDNN makes copies of input and output for it.
    each = layer.out_channels * x[0, 0].nbytes // math.prod(layer.stride)
    return _in_pieces(lambda some: nn.Conv2d.forward(layer, some.contiguous()), x, each)


def _in_pieces(form: Form, x: Tensor, each: int) -> Tensor:
    """A form on some samples at a time, so that what it needs beside input and output stays small; `each` bytes are
    about what a sample's output takes."""
    pieces = torch.split(x, max(1, AT_ONCE // max(1, each)))
    first = form(pieces[0])
    if len(pieces) == 1:
        return first
    order = torch.channels_last if first.stride(1) == 1 else torch.contiguous_format
    output = torch.empty((len(x), *first.shape[1:]), dtype=x.dtype, memory_format=order)
    places = torch.split(output, len(pieces[0]))
    places[0].copy_(first)
    for some, place in zip(pieces[1:], places[1:], strict=True):
        place.copy_(form(some))
    return output


def _is_sequence(part: nn.Module) -> TypeGuard[nn.Sequential]:
    return type(part) is nn.Sequential and "forward" not in vars(part)


def _steps(sequence: nn.Sequential) -> list[tuple[nn.Module, Form | None, nn.Module]]:
    """The layers of a sequence, each with its form in place, where it has one and is given a tensor that nobody else
    sees, and with the layer that makes that tensor."""
    steps, maker = list[tuple[nn.Module, Form | None, nn.Module]](), sequence[:0]
    for layer in sequence:
        plain = "forward" not in vars(layer)
        in_place = IN_PLACE.get(type(layer)) if plain and type(maker) in FRESH else None
        steps.append((layer, in_place, maker))
        maker = maker if type(layer) is nn.Identity or in_place else layer
    return steps


def _in_sequence(steps: list[tuple[nn.Module, Form | None, nn.Module]], x: Tensor) -> Tensor:
    """A sequence, one layer after the other. Whoever looks on with a hook sees what it would see otherwise."""
    for layer, in_place, maker in steps:
        x = in_place(x) if in_place and not _watched(layer) and not _watched(maker) else layer(x)
    return x


def _watched(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _pool(size: int, x: Tensor) -> Tensor:
    """The largest of each tile, without the positions that torch's pooling finds beside it."""
    rows, columns = (length // size * size for length in x.shape[-2:])
    if not rows or not columns or x.ndim != 4:
        return F.max_pool2d(x, size)  # which says what is wrong

    def pool(x: Tensor) -> Tensor:
        x = reduce(torch.maximum, [x[..., start:rows:size, :] for start in range(size)])
        return reduce(torch.maximum, [x[..., start:columns:size] for start in range(size)])

    return _in_pieces(pool, x, x[0].nbytes // size**2)


@cache
def keep_freed_memory() -> None:
    """Let freed memory stay with the process: every forward pass allocates the same few megabytes.

    glibc gives large blocks back to the system, and then each page of the next one costs a fault, a sixth of a forward
    pass of WRN-10-2. Having freed a block once, it keeps blocks up to that size, and twice as much altogether; 32 MB
    are the most that it learns from.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def give_back_freed_memory() -> None:
    """The opposite, for whoever has little memory: freed blocks go back to the system at once, for good in this
    process. It costs page faults; only glibc needs it."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for setting in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            library.mallopt(setting, KEPT)
