"""A module's forward pass as if its parameters had been moved along outer directions, while they stay what they are.

A mode of PyTorch sees every function that a module calls, and which of its arguments are trained parameters. Those that
multiply by a matrix get a second, small term: x (W + a bᵀ)ᵀ = x Wᵀ + (x·b) aᵀ. Every other function gets the moved
parameter itself. `torch.func.vmap` makes a pass for one direction one for many: a module sees the samples of one
direction, and may arrange them as it likes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from baffle.errors import ModelError
from baffle.runtime.torch.functions import FORMS, QUICKER
from baffle.runtime.torch.rows import level
from baffle.runtime.torch.shares import Share, Shares

DESCRIPTIONS = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "element_size", "is_contiguous")),
    *(getattr(Tensor, name) for name in ("nelement", "ndimension", "is_floating_point", "is_complex", "__len__")),
}
"""Functions that say what a parameter is like and not what it holds."""


class MovedParameters(TorchFunctionMode):
    """Inside, functions see parameters as moved by their shares. `names` has their names by id. To be made inside a
    `vmap` over the directions."""

    def __init__(self, shares: Shares, names: Mapping[int, str]) -> None:
        super().__init__()
        self._shares = shares
        self._names = names
        self._open = set[Any]()

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = level() == self._shares.level  # a module's own vmap has rows that are no directions
        if func in QUICKER and known:
            return QUICKER[func](*self._all_moved(args), **self._all_moved(kwargs))
        if not (self._moves(args) or self._moves(kwargs.values())) or func in DESCRIPTIONS:
            return func(*args, **kwargs)
        if func in TRANSPOSING and (view := self._transposed(func, args, kwargs)) is not None:
            return view
        if func in FORMS and known and (output := FORMS[func](self._shares, *args, **kwargs)) is not None:
            return output
        if _name(func) == "__get__" and not isinstance(value := func(*args, **kwargs), Tensor):
            return value
        if isinstance(func, FunctionType) and func not in self._open:
            return self._enter(func, args, kwargs)
        try:
            return func(*self._all_moved(args), **self._all_moved(kwargs))
        except Exception as fault:  # whatever PyTorch raises: it was asked for something that only it knows
            used = [self._names[leaf] for leaf in _ids((args, tuple(kwargs.values()))) if leaf in self._names]
            raise ModelError(
                f"PyTorch cannot compute {_name(func)} of {', '.join(used)} for many directions at once"
            ) from fault

    def _moves(self, arguments: Iterable[Any]) -> bool:
        """Whether a parameter is among these arguments, or in a list of theirs. Every function asks, so it is quick."""
        for value in arguments:
            if value in self._shares or (isinstance(value, (list, tuple)) and self._moves(value)):
                return True
        return False

    def _all_moved(self, tree: Any) -> Any:
        if isinstance(tree, (list, tuple)):
            items = [self._all_moved(item) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        if isinstance(tree, dict):
            return {name: self._all_moved(item) for name, item in tree.items()}
        return self._shares.moved(tree)

    def _transposed(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The transpose of a matrix. None if it is no plain transpose."""
        share, dimensions = self._shares.of(args[0]), {*args[1:], *kwargs.values()}
        if share is None or args[0].ndim != 2 or dimensions not in (set(), {0, 1}, {-1, -2}):
            return None
        view: Tensor = func(*args, **kwargs)
        self._shares.add_transposed(view, share)
        return view

    def _enter(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        """Run a function that PyTorch wrote in Python, so that this mode sees what it calls in turn."""
        self._open.add(func)
        try:
            with self:
                return _without_dispatch(func)(*args, **kwargs)
        finally:
            self._open.discard(func)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


TRANSPOSING = {Tensor.t, Tensor.transpose, torch.t, torch.transpose, _getter("T"), _getter("mT")}


@cache
def _without_dispatch(func: FunctionType) -> Callable[..., Any]:
    """The same function without its first question: whether a mode would like to run it instead."""
    silent = {name: _no for name in func.__globals__ if name.startswith("has_torch_function")}
    copy = FunctionType(func.__code__, func.__globals__ | silent, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*_: object) -> bool:
    return False


def _ids(tree: Any) -> Iterator[int]:
    """The ids of arguments, and of what lists of arguments hold."""
    for value in tree:
        if isinstance(value, (list, tuple)):
            yield from _ids(value)
        else:
            yield id(value)


def run_moved(run: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter], shares: Sequence[Share]) -> Tensor:
    """What `run()` gives when these parameters are moved, a row for each direction."""
    names = {id(parameter): name for name, parameter in parameters.items()}

    def one(_: Tensor) -> Tensor:
        with MovedParameters(Shares(dict(zip(names, shares, strict=True))), names):
            return run()

    output: Tensor = torch.func.vmap(one)(torch.arange(len(shares[0].a)))
    return output
