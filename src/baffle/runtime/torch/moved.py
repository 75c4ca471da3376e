"""A module's forward pass as if its parameters had been moved along outer directions, while they stay what they are.

A mode of PyTorch sees every function that a module calls, and which of its arguments are trained parameters. Those that
multiply by a matrix get a second, small term: x (W + a bᵀ)ᵀ = x Wᵀ + (x·b) aᵀ. Every other function gets the moved
parameter itself. The pass is written for one direction, and `torch.func.vmap` makes it one for many: a module sees the
samples of one direction, and may arrange them as it likes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from baffle.errors import ModelError
from baffle.runtime.torch.attention import attend


class Share(NamedTuple):
    """What one direction adds to one parameter: a bᵀ, as a matrix of a's length × b's length; or `a` itself without
    `b`, in the parameter's shape."""

    a: Tensor
    b: Tensor | None = None

    def whole(self) -> Tensor:
        return self.a if self.b is None else self.a[:, None] * self.b


class Matrix(NamedTuple):
    """The share of a matrix."""

    a: Tensor
    b: Tensor


Form = Callable[..., Tensor | None]
"""How a function computes with a moved matrix; None if its arguments are others, and it needs the matrix itself."""

DESCRIPTIONS = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "element_size", "is_contiguous")),
    *(getattr(Tensor, name) for name in ("nelement", "ndimension", "is_floating_point", "is_complex", "__len__")),
}
"""Functions that say what a parameter is like and not what it holds."""


class MovedParameters(TorchFunctionMode):
    """Inside, functions see the parameters with these ids as moved by their shares. Inside `vmap` a share's tensors are
    those of many directions."""

    def __init__(self, shares: Mapping[int, Share], names: Mapping[int, str]) -> None:
        super().__init__()
        self._shares = dict(shares)
        self._names = names
        self._moved = dict[int, Tensor]()
        self._views = list[Tensor]()  # keeps them alive, so that no other tensor gets the id of one
        self._open = set[Any]()

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attend(*args, **kwargs)
        if not (self._moves(args) or self._moves(kwargs.values())) or func in DESCRIPTIONS:
            return func(*args, **kwargs)
        if func in TRANSPOSING and (view := self._transposed(func, args, kwargs)) is not None:
            return view
        if func in FORMS and (output := FORMS[func](self, *args, **kwargs)) is not None:
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
            if id(value) in self._shares or (isinstance(value, (list, tuple)) and self._moves(value)):
                return True
        return False

    def share(self, parameter: object) -> Share | None:
        return self._shares.get(id(parameter))

    def matrix(self, parameter: Tensor) -> Matrix | None:
        """The share of a parameter of two dimensions."""
        share = self.share(parameter)
        return None if share is None or share.b is None or parameter.ndim != 2 else Matrix(share.a, share.b)

    def moved(self, parameter: Any) -> Any:
        """The parameter where the direction leads; anything else as it is."""
        share = self.share(parameter)
        if share is None:
            return parameter
        if id(parameter) not in self._moved:
            self._moved[id(parameter)] = parameter + share.whole().reshape(parameter.shape)
        return self._moved[id(parameter)]

    def _all_moved(self, tree: Any) -> Any:
        if isinstance(tree, (list, tuple)):
            items = [self._all_moved(item) for item in tree]
            return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
        if isinstance(tree, dict):
            return {name: self._all_moved(item) for name, item in tree.items()}
        return self.moved(tree)

    def _transposed(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The transpose of a matrix, whose share is the transposed share. None if it is no plain transpose."""
        share, dimensions = self.matrix(args[0]), {*args[1:], *kwargs.values()}
        if share is None or dimensions not in (set(), {0, 1}, {-1, -2}):
            return None
        view: Tensor = func(*args, **kwargs)
        self._views.append(view)
        self._shares[id(view)] = Share(share.b, share.a)
        return view

    def _enter(self, func: FunctionType, args: Any, kwargs: Any) -> Any:
        """Run a function that PyTorch wrote in Python, so that this mode sees what it calls in turn."""
        self._open.add(func)
        try:
            with self:
                return _without_dispatch(func)(*args, **kwargs)
        finally:
            self._open.discard(func)


def _linear(mode: MovedParameters, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if (share := mode.matrix(weight)) is None:
        return None
    output = torch.addcmul(F.linear(input, weight), torch.matmul(input, share.b).unsqueeze(-1), share.a)
    return output if bias is None else output + mode.moved(bias)


def _matmul(mode: MovedParameters, input: Tensor, other: Tensor) -> Tensor | None:
    if (share := mode.matrix(other)) is None or mode.share(input):
        return None
    return torch.addcmul(torch.matmul(input, other), torch.matmul(input, share.a).unsqueeze(-1), share.b)


def _convolution(convolve: Callable[..., Tensor]) -> Form:
    """A convolution is a product with a matrix of filters, and a bᵀ are equal filters up to a factor each: one more
    filter (one for each group) and an outer product."""

    def form(
        mode: MovedParameters,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        if (share := mode.share(weight)) is None or share.b is None:
            return None
        how = (stride, padding, dilation, groups)
        places = [1] * (weight.ndim - 2)
        filters = share.b.view(1, *weight.shape[1:]).expand(groups, *weight.shape[1:])
        responses = convolve(input, filters, None, *how)
        if groups > 1:
            responses = responses.repeat_interleave(len(weight) // groups, dim=-len(places) - 1)
        output = torch.addcmul(convolve(input, weight, None, *how), responses, share.a.view(-1, *places))
        return output if bias is None else output + mode.moved(bias).view(-1, *places)

    return form


def _embedding(mode: MovedParameters, weight: Tensor, indices: Tensor, *settings: Any, **named: Any) -> Tensor | None:
    if (share := mode.matrix(weight)) is None:
        return None
    rows = torch.embedding(weight, indices, *settings, **named)
    return torch.addcmul(rows, share.a[indices].unsqueeze(-1), share.b)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


TRANSPOSING = {Tensor.t, Tensor.transpose, torch.t, torch.transpose, _getter("T"), _getter("mT")}

FORMS: Mapping[Any, Form] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.conv1d: _convolution(torch.conv1d),
    torch.conv2d: _convolution(torch.conv2d),
    torch.conv3d: _convolution(torch.conv3d),
    torch.embedding: _embedding,
}
"""Functions that multiply by a matrix. All others get the moved parameters, a copy for each direction."""


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
    """What `run()` gives when these parameters are moved, a row for each direction. Every tensor of the shares has a
    row for each direction, too."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    matrices = [share.b is not None for share in shares]
    tensors = [tensor for share in shares for tensor in share if tensor is not None]

    def one(*tensors: Tensor) -> Tensor:
        left = iter(tensors)
        each = [Share(next(left), next(left) if matrix else None) for matrix in matrices]
        with MovedParameters(dict(zip(names, each, strict=True)), names):
            return run()

    output: Tensor = torch.func.vmap(one)(*tensors)
    return output
