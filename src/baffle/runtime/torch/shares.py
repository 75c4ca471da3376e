"""What outer directions add to a module's parameters, and where that leads."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from baffle.runtime.torch.rows import level, rows_of, seen_by_each


class Share(NamedTuple):
    """What directions add to one parameter, a row each: a bᵀ, as a matrix of a's length × b's length; or `a` itself
    without `b`."""

    a: Tensor
    b: Tensor | None = None

    def whole(self) -> Tensor:
        return self.a if self.b is None else self.a[:, :, None] * self.b[:, None]


class Matrix(NamedTuple):
    """The share of a matrix."""

    a: Tensor
    b: Tensor


class Shares:
    """The shares of the parameters with these ids. To be made and used inside a `vmap` over the directions."""

    def __init__(self, shares: Mapping[int, Share]) -> None:
        self._shares = dict(shares)
        self._moved = dict[int, Tensor]()
        self.level = level()
        self._views = list[Tensor]()  # keeps them alive, so that no other tensor gets the id of one

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._shares

    def of(self, parameter: object) -> Matrix | None:
        """The share of a parameter of two or more dimensions."""
        share = self._shares.get(id(parameter))
        return None if share is None or share.b is None else Matrix(share.a, share.b)

    def add_transposed(self, view: Tensor, share: Matrix) -> None:
        """A view is the transpose of a matrix with this share."""
        self._views.append(view)
        self._shares[id(view)] = Share(share.b, share.a)

    def moved(self, parameter: Any) -> Any:
        """The parameter where the directions lead, as a module sees it; anything else as it is."""
        if parameter not in self:
            return parameter
        if id(parameter) not in self._moved:
            whole = self._shares[id(parameter)].whole()
            self._moved[id(parameter)] = seen_by_each(parameter + whole.view(len(whole), *parameter.shape), self.level)
        return self._moved[id(parameter)]

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor, or of where the directions lead if it is a parameter."""
        return rows_of(self.moved(tensor))

    def rows_if_any(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self.rows(tensor)
