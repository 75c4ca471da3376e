"""The method alone: the gradient of any function, from values of that function."""

from collections.abc import Callable
from hashlib import sha256

import numpy as np

from baffle.core.directions import Directions, blocks, dense, distribution_names, distribution_of
from baffle.core.probe import SCHEMES
from baffle.core.samples import Array
from baffle.errors import PlanError

KEY_BYTES = 32


def estimate(
    loss: Callable[[Array], float],
    weights: Array,
    key: bytes | int,
    k: int,
    sigma: float,
    *,
    scheme: str = "forward",
    distribution: str = "rademacher",
) -> Array:
    """The gradient of a black-box function, estimated from its values along `k` random directions.

    `loss` is called with arrays of the shape of `weights` and must give a number; it need not have a derivative.
    `sigma` is how far to move along a direction. The key determines the directions: the same key gives the same
    estimate. `scheme` "forward" calls the function k + 1 times, "central" 2k times and with less bias. The estimate has
    the shape of the weights; it is float64 if they are, and else float32. Directions of the `distribution` "outer" are
    products a bᵀ of ±1, for weights that are a matrix.

    >>> import numpy as np
    >>> import baffle
    >>> def bowl(weights):
    ...     return float(np.sum((weights - 3) ** 2))
    >>> weights = np.zeros(4)
    >>> for step in range(200):
    ...     weights -= 0.02 * baffle.estimate(bowl, weights, key=step, k=8, sigma=1e-4)
    >>> np.round(weights, 2)
    array([3., 3., 3., 3.])
    """
    for name, value, known in (("scheme", scheme, SCHEMES), ("distribution", distribution, distribution_names())):
        if value not in known:
            raise PlanError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")
    if k < 1 or not sigma > 0:
        raise PlanError(f"expected at least one direction and a positive sigma, got k = {k} and sigma = {sigma:g}")
    given = np.asarray(weights)
    flat: Array = given.astype(np.float64 if given.dtype == np.float64 else np.float32).reshape(-1)
    directions = Directions(_key(key), distribution_of(distribution, (given.shape,)))
    supports = dense(len(flat), k)

    def at(moved: Array) -> float:
        found = loss(moved.reshape(given.shape).copy())  # whoever keeps it must not see it change
        try:
            return float(found)
        except (TypeError, ValueError):
            raise PlanError(f"loss: expected a function that returns one number, got {type(found).__name__}") from None

    scalars = SCHEMES[scheme](at, flat, directions, supports, sigma).scalars
    total = np.zeros(len(flat))
    for numbers, support in blocks(supports):
        total += scalars[list(numbers)] @ directions.over(support, numbers).astype(np.float64)
    return np.asarray(total * (directions.distribution.unit / k), flat.dtype).reshape(given.shape)


def _key(key: bytes | int) -> bytes:
    """32 bytes as they are; anything else by its hash."""
    if isinstance(key, bytes) and len(key) == KEY_BYTES:
        return key
    if not isinstance(key, (bytes, int, np.integer)):
        raise PlanError(f"key: expected bytes or a whole number, got {key!r}")
    text = key if isinstance(key, bytes) else str(int(key)).encode()
    return sha256(b"baffle/estimate/1" + text).digest()
