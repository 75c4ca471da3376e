"""Data as people have it: arrays, tensors, lists, map-style data sets, and tuples or dicts of them as a model's inputs.

All of it becomes arrays in memory. A client's data is a pair of samples and targets, or a map-style data set (anything
with a length and items by number) whose items are such pairs. A list holds the data of several clients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from baffle.core.arrays import I64
from baffle.core.ports import Batch
from baffle.core.samples import Array, Labels, Samples, arrays, count, describe, each
from baffle.data.dataset import Dataset
from baffle.errors import UnusableDataError

FEW = 2
"""How many samples a model is tried on."""


@dataclass(frozen=True)
class GivenData:
    """What `baffle.fit` trains on. `shares` says which client holds which training samples; None if the data came as
    one set, to be shared out by the plan's partition."""

    train: Dataset
    test: Dataset | None
    shares: list[I64] | None

    def few(self) -> Batch:
        """The first samples, which a model is tried on and known again by."""
        return self.train.batch(np.arange(min(FEW, len(self.train))))

    def fingerprint(self) -> str:
        """Identifies the training data and who holds what of it."""
        known = sha256()
        shares = self.shares or [np.arange(len(self.train))]
        for array in (np.array([len(share) for share in shares]), *arrays(self.train.samples), self.train.labels):
            known.update(f"{array.dtype.str}{array.shape}".encode())
            known.update(np.ascontiguousarray(array).data)
        return known.hexdigest()


def given_data(clients: Any, test: Any = None) -> GivenData:
    """Data that was given to `baffle.fit`. A list is one of clients; anything else is one set for all of them."""
    held_out = None if test is None else Dataset(*_pair(test, "test"))
    if not isinstance(clients, list):
        data = GivenData(Dataset(*_pair(clients, "clients")), held_out, None)
        _require_alike({"clients": data.train.samples}, held_out)
        return data
    if not clients:
        raise UnusableDataError("clients: expected the data of at least one client, got an empty list")
    pairs = [_pair(data, f"clients[{number}]") for number, data in enumerate(clients)]
    _require_alike({f"clients[{number}]": x for number, (x, _) in enumerate(pairs)}, held_out)
    for number, (x, y) in enumerate(pairs):
        if count(x) != len(y):
            raise UnusableDataError(
                f"clients[{number}] has {count(x):,} samples, but {len(y):,} labels; expected a label for each sample"
            )
    ends = np.cumsum([len(y) for _, y in pairs])
    shares = [np.arange(end - len(y), end) for end, (_, y) in zip(ends, pairs, strict=True)]
    samples, labels = joined([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])
    return GivenData(Dataset(samples, labels), held_out, shares)


def given_samples(x: Any, whose: str = "x") -> Samples:
    """Samples alone: an array, a tensor, a list, or a tuple or dict of them."""
    if isinstance(x, dict):
        return {str(name): _array(values, f"{whose}[{name!r}]") for name, values in x.items()}
    if isinstance(x, tuple):
        return tuple(_array(values, f"{whose}[{number}]") for number, values in enumerate(x))
    return _array(x, whose)


def joined(parts: Sequence[Samples]) -> Samples:
    """Samples behind each other, in the form that they have."""
    columns = [np.concatenate(column) for column in zip(*map(arrays, parts), strict=True)]
    remaining = iter(columns)
    return each(lambda _: next(remaining), parts[0])


def _pair(data: Any, whose: str) -> tuple[Samples, Labels]:
    if isinstance(data, (tuple, list)) and len(data) == 2:
        x, y = data
    elif not isinstance(data, (tuple, list, dict, str, bytes, np.ndarray)) and hasattr(data, "__getitem__"):
        x, y = _columns(data, whose)
    else:
        raise UnusableDataError(
            f"{whose}: expected a pair (x, y) of samples and targets, or a map-style data set of such pairs, got "
            f"{type(data).__name__}"
        )
    return given_samples(x, f"{whose}: x"), _array(y, f"{whose}: y")


def _columns(data: Any, whose: str) -> tuple[Any, Any]:
    """The samples and the targets of a map-style data set."""
    if not hasattr(data, "__len__"):
        raise UnusableDataError(f"{whose}: a data set needs a length to be divided into samples; make it map-style")
    items = [data[number] for number in range(len(data))]
    if not all(isinstance(item, (tuple, list)) and len(item) == 2 for item in items):
        raise UnusableDataError(f"{whose}: expected items of a data set that are pairs (x, y), got others")
    xs, ys = zip(*items, strict=True) if items else ((), ())
    first = xs[0] if xs else None
    if isinstance(first, dict):
        return {name: [x[name] for x in xs] for name in first}, list(ys)
    if isinstance(first, tuple):
        return tuple(list(column) for column in zip(*xs, strict=True)), list(ys)
    return list(xs), list(ys)


def _array(values: Any, whose: str) -> Array:
    """Numbers as an array: floats in float32, integers as they are."""
    if isinstance(values, list) and values and hasattr(values[0], "detach"):
        values = [_from_tensor(value) for value in values]
    try:
        array = np.asarray(_from_tensor(values))
    except (TypeError, ValueError):
        raise UnusableDataError(
            f"{whose}: its entries have different shapes and cannot be one array; pad them to the same length"
        ) from None
    if array.dtype.kind == "b":
        return array.astype(np.int64)
    if array.dtype.kind not in "uif" or array.ndim == 0:
        raise UnusableDataError(
            f"{whose}: expected numbers whose first axis is the sample, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array


def _from_tensor(value: Any) -> Any:
    """A tensor's numbers; anything else as it is. Known by its methods, since PyTorch need not be installed."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _require_alike(clients: Mapping[str, Samples], test: Dataset | None) -> None:
    """Refuse samples of several clients, or of the test set, that differ in form, type or shape."""
    (first, x), *others = clients.items()
    for whose, other in (*others, *([("test", test.samples)] if test else [])):
        if type(other) is not type(x) or describe(other) != describe(x):
            raise UnusableDataError(
                f"{whose} has samples of {describe(other)}, but {first} of {describe(x)}; make them alike"
            )
