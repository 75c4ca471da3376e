"""The memory that some work takes: tensors, counted as they come and go, and what a process really took."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baffle.errors import BaffleError


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made while it is on and still in use; `peak` is the most at one time.

    A convolution counts its input and its output twice, because it may work on copies in another order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._users = dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(made):
            where, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
            if where in self._users or where not in given:
                self._use(tensor, where, size)
        copies = sum(tensor.nbytes for tensor in _tensors((args, made))) if "conv" in func.name() else 0
        self.peak = max(self.peak, self.live + copies)
        return made

    def _use(self, tensor: Tensor, where: int, size: int) -> None:
        if where not in self._users:
            self.live += size
        self._users[where] = self._users.get(where, 0) + 1
        weakref.finalize(tensor, self._leave, where, size)

    def _leave(self, where: int, size: int) -> None:
        self._users[where] -= 1
        if not self._users[where]:
            del self._users[where]
            self.live -= size


def tensor_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors that some work on a CPU holds at one time, beside those that were there before."""
    tally = Tally()
    with tally:
        work()
    return tally.peak


def grown(work: Callable[[], object]) -> int:
    """By how many bytes this process's high-water mark rises above what it holds now, with everything that is free
    given back before. It says something in a fresh process on Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise BaffleError("the high-water mark of a process is measured on Linux only: /proc/self/status is missing")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from here

    def kilobytes(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))

    before = kilobytes("VmRSS")
    work()
    return 1024 * (kilobytes("VmHWM") - before)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
