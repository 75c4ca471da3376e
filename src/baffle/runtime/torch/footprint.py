"""Memory measurements: bytes of live tensors during a computation, and the high-water mark of the process."""

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
    """Counts the bytes of live tensors that were created while it is active; `peak` is the maximum.

    A convolution counts its input and output twice, because it may work on copies in another memory layout.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._users = dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in self._users or address not in arguments:
                self._use(tensor, address, storage.nbytes())
        copies = sum(tensor.nbytes for tensor in _tensors((args, result))) if "conv" in func.name() else 0
        self.peak = max(self.peak, self.live + copies)
        return result

    def _use(self, tensor: Tensor, address: int, size: int) -> None:
        if address not in self._users:
            self.live += size
        self._users[address] = self._users.get(address, 0) + 1
        weakref.finalize(tensor, self._leave, address, size)

    def _leave(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self.live -= size


def tensor_bytes(work: Callable[[], object]) -> int:
    """The peak bytes of tensors that a computation on a CPU adds to those that existed before."""
    tally = Tally()
    with tally:
        work()
    return tally.peak


def grown(work: Callable[[], object]) -> int:
    """By how many bytes `work` raises this process's high-water mark above its present memory. Free memory is returned
    to the system first. Only meaningful in a fresh process on Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        raise BaffleError(
            "the high-water mark of a process can only be measured on Linux: /proc/self/status is missing"
        )
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark

    def kilobytes(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))

    before = kilobytes("VmRSS")
    work()
    return 1024 * (kilobytes("VmHWM") - before)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
