"""Tensors of many directions inside `torch.func.vmap`: to a module they are those of one direction, in memory they have
a row for each.

A layer that is told about all rows can be quicker than what `vmap` makes of it. The functions of PyTorch behind this
module are not public. If another version has others, the trial before a run fails, and directions take a pass each.
"""

import torch
from torch import Tensor

_functorch = torch._C._functorch


def level() -> int:
    """How many `vmap`s are around us."""
    return _functorch.maybe_current_level() or 0


def differs(tensor: object) -> bool:
    """Whether this is a tensor with a row for each direction."""
    return isinstance(tensor, Tensor) and _functorch.is_batchedtensor(tensor)


def rows_of(tensor: Tensor) -> Tensor:
    """The rows of all directions, or a single one if it is the same for all."""
    if not differs(tensor):
        return tensor[None]
    rows, at = _functorch.get_unwrapped(tensor), _functorch.maybe_get_bdim(tensor)
    return rows.movedim(at, 0) if at else rows


def seen_by_each(rows: Tensor, around: int | None = None) -> Tensor:
    """A tensor with these rows, as the module sees it: inside the innermost `vmap`, or the one of level `around`."""
    return _functorch._add_batch_dim(rows, 0, around or level())
