"""The exact gradient of a model's last linear layer, its head, from a forward pass alone.

For outputs o = h Wᵀ + b, the gradient is the mean over samples of (∂ℓ/∂o) hᵀ for W, and of ∂ℓ/∂o for b. The derivative
of a loss by the outputs has a closed form, and a forward pass at the unmoved weights knows h and o. So the head needs
no directions, and those of a round are left for the other weights.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import Support


class HeadPass(NamedTuple):
    """What a forward pass knows about the head, with a row for each sample: ∂ℓ/∂o of its own loss, and h. A row may
    have further rows, one for each position at which the head is used."""

    loss: float  # of the batch
    slopes: F64
    inputs: F64

    def take(self, rows: slice) -> "HeadPass":
        """The same for some samples; the loss stays that of all."""
        return self._replace(slopes=self.slopes[rows], inputs=self.inputs[rows])


LookIntoHead = Callable[[F32], HeadPass]  # weights → what a pass on a fixed batch knows about the head


class Head(NamedTuple):
    """Where the head's tensors lie in the flat vector. W has a row for each output, unless it is stored `by_input`."""

    weight: tuple[int, int]
    bias: tuple[int, int] = (0, 0)
    by_input: bool = False

    @property
    def support(self) -> Support:
        """The same, as a part of the weights."""
        first, second = sorted([self.weight, self.bias])
        if first == (0, 0):  # there is no bias
            return Support(*second)
        return Support(first[0], second[1]) if first[1] == second[0] else Support(*first, second)

    def gradient(self, seen: HeadPass) -> F64:
        """The gradient of the mean loss over the samples of a pass, in the order of the flat vector."""
        slopes = seen.slopes.reshape(-1, seen.slopes.shape[-1])
        inputs = seen.inputs.reshape(len(slopes), -1)
        weight = (inputs.T @ slopes if self.by_input else slopes.T @ inputs).reshape(-1)
        parts = [(self.weight, weight), (self.bias, slopes.sum(axis=0))] if self.bias[1] else [(self.weight, weight)]
        gradient: F64 = np.concatenate([numbers for _, numbers in sorted(parts, key=lambda part: part[0])])
        return gradient / len(seen.slopes)


def without(support: Support, head: Support) -> Support | None:
    """The weights of a support that are not the head's; None if there are none. Raises a ValueError if they lie in more
    than two places."""
    slices = [(part.start, part.stop) for part, _ in support.parts()]
    for cut, _ in head.parts():
        slices = [
            piece
            for start, stop in slices
            for piece in ((start, min(stop, cut.start)), (max(start, cut.stop), stop))
            if piece[0] < piece[1]
        ]
    if len(slices) > 2:
        raise ValueError(f"the weights besides the head lie in {len(slices)} places")
    return Support(*slices[0], *slices[1:]) if slices else None
