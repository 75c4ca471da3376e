"""A module's forward pass in a quicker form on a CPU: the same output to rounding, from a better order in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Form = Callable[[Tensor], Tensor]

PIXELS = 100
"""Smaller images run plainly: on the 8 × 8 digits, group normalisation loses more than convolutions gain."""


class Quick:
    """Runs a module with its images stored channel by channel of each pixel ("channels last") and with some layers in
    a quicker form. Between two calls the module is as it was.

    A module that relies on the usual order, as `view` does, fails then; from its first failure on it runs as it is.
    """

    def __init__(self, module: nn.Module, plain: bool = False) -> None:
        self._module = module
        self._forms = {layer: form for layer in module.modules() if (form := _form(layer))}
        self._plain = plain or not self._forms
        keep_freed_memory()

    def __call__(self, x: Tensor) -> Tensor:
        if self._suits(x):
            try:
                return self._run(x)
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
        return partial(_convolve, layer, _order(layer))
    if type(layer) is nn.MaxPool2d:
        simple = (layer.padding, layer.dilation, layer.return_indices, layer.ceil_mode) == (0, 1, False, False)
        if simple and isinstance(layer.kernel_size, int) and layer.stride == layer.kernel_size:
            return partial(_pool, layer.kernel_size)
    return None


def _order(layer: nn.Conv2d) -> torch.memory_format:
    """Channels last is quicker, but for large filters with many outputs (measured, oneDNN 3.12 with AVX2)."""
    large = min(layer.kernel_size) >= 5 and layer.out_channels >= 32
    return torch.contiguous_format if large else torch.channels_last


def _convolve(layer: nn.Conv2d, order: torch.memory_format, x: Tensor) -> Tensor:
    return nn.Conv2d.forward(layer, x.contiguous(memory_format=order) if x.ndim == 4 else x)


def _pool(size: int, x: Tensor) -> Tensor:
    """The largest of each tile, without the positions that torch's pooling finds beside it."""
    rows, columns = (length // size * size for length in x.shape[-2:])
    if not rows or not columns:
        return F.max_pool2d(x, size)  # which says what is wrong
    x = reduce(torch.maximum, [x[..., start:rows:size, :] for start in range(size)])
    return reduce(torch.maximum, [x[..., start:columns:size] for start in range(size)])


@cache
def keep_freed_memory() -> None:
    """Let freed memory stay with the process: every forward pass allocates the same few megabytes.

    glibc gives large blocks back to the system, and then each page of the next one costs a fault, a sixth of a forward
    pass of WRN-10-2. Having freed a block once, it keeps blocks up to that size, and twice as much altogether; 32 MB
    are the most that it learns from.
    """
    torch.empty(31 << 20, dtype=torch.uint8)
