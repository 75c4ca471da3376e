"""The law of an estimate: what K gaussian directions would make of a gradient, drawn without probing any of them.

For exact scalars, an estimate of the gradient g is ĝ = (1/K) Σ z_k (z_k · g). Along e = g/|g|, the numbers
u_k = z_k · e are independent and normal, and the part of z_k across e is independent of them. So

    ĝ = |g| (S/K · e + √S/K · ζ),   S = Σ u_k² ~ χ²(K),   ζ ~ N(0, I) across e,

exactly in law, for every K. Directions that touch a part of the weights have the same law there, and where parts
overlap their sums add up. It takes one gradient, and one normal number for each weight instead of K.

The law knows nothing of σ, kinks or rounding: it holds where differences are linear. Lane 2j of a key's stream gives
the ζ of part j, and lane 2j + 1 its S, so no number is used twice. S is an exact integer sum, and lengths and products
are sums along the tree of `baffle.core.update`: so the same key and gradient give the same bits everywhere.
"""

import math
from collections.abc import Sequence

import numpy as np

from baffle.core.arrays import F32, F64
from baffle.core.directions import NUMBERS_AT_ONCE, Directions, Support, coverage, grouped
from baffle.core.update import tree_sum


def draw(gradient: F32, directions: Directions, supports: Sequence[Support], *, block: int = NUMBERS_AT_ONCE) -> F32:
    """An estimate of the gradient from so many directions as there are supports. Weights that none touches get 0. No
    bit depends on `block`, how many numbers are drawn at a time."""
    total = np.zeros(len(gradient))
    for place, (support, numbers) in enumerate(grouped(supports).items()):
        exact = np.concatenate([gradient[weights] for weights, _ in support.parts()]).astype(np.float64)
        summed = _sum_over(exact, len(numbers), directions, 2 * place, block)
        for weights, here in support.parts():
            total[weights] += summed[here]
    estimate: F32 = (total / np.maximum(coverage(supports, len(gradient)), 1)).astype(np.float32)
    return estimate


def _sum_over(gradient: F64, k: int, directions: Directions, lane: int, block: int) -> F64:
    """K · ĝ for a gradient over one support, which is S g + √S (|g| ζ − (ζ · g / |g|) g) for a free ζ."""
    length = math.sqrt(tree_sum(gradient * gradient))
    if length == 0:
        return gradient
    unit = directions.distribution.unit
    along = _numbers(directions, lane + 1, k, block).astype(np.int64)
    s = int((along * along).sum()) * unit**2  # below 2⁵³ units, where float64 counts every integer
    zeta = _numbers(directions, lane, len(gradient), block) * unit
    own = s - math.sqrt(s) * tree_sum(zeta * gradient) / length
    return own * gradient + (math.sqrt(s) * length) * zeta


def _numbers(directions: Directions, lane: int, count: int, block: int) -> F64:
    """The first numbers of a lane."""
    starts = range(0, count, block)
    return np.concatenate([directions.draw([lane], at, min(at + block, count))[0].astype(np.float64) for at in starts])
