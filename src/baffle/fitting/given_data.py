"""Data as users have them: arrays, tensors, lists, map-style data sets, and tuples or dicts of them as a model's
inputs.

All of them become arrays in memory. A client's data are a pair of samples and targets, a map-style data set (anything
with a length and items by number) whose items are such pairs, or a DataLoader of one. Items may also be dicts with a
`label` or `labels`, as data sets of Hugging Face have them. A list, or a dict by name, holds the data of several
clients. Test data may be those of each client, too: a dict by name, or a share of its own samples, held out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from baffle.core.arrays import I64
from baffle.core.ports import Batch
from baffle.core.samples import Array, Labels, Samples, arrays, count, describe, joined, take
from baffle.core.seeds import permutation
from baffle.data.sources import Dataset
from baffle.errors import UnusableDataError

Pair = tuple[Samples, Labels]
FEW = 2  # samples that a model is tried on


@dataclass(frozen=True)
class GivenData:
    """The data that `baffle.fit` trains on. `shares` has the training samples of each client; None if the data came as
    one set, which the plan's partition divides."""

    train: Dataset
    test: Dataset | None
    shares: list[I64] | None
    validation: Dataset | None = None
    testers: tuple[str, ...] = ()  # whose the test samples are, as the test set's `domain_of` counts them

    def few(self) -> Batch:
        """The first samples, on which a model is tried and by which it is identified."""
        return self.train.batch(np.arange(min(FEW, len(self.train))))

    def fingerprint(self) -> str:
        """A hash of the training data and of the shares of clients."""
        known = sha256()
        shares = self.shares or [np.arange(len(self.train))]
        for array in (np.array([len(share) for share in shares]), *arrays(self.train.samples), self.train.labels):
            known.update(f"{array.dtype.str}{array.shape}".encode())
            known.update(np.ascontiguousarray(array).data)
        return known.hexdigest()


def given_data(clients: Any, test: Any = None, validation: Any = None) -> GivenData:
    """Convert data that were given to `baffle.fit`: a list with the data of each client, or one set for all of them."""
    several = isinstance(clients, (list, Mapping))
    if several:
        if not clients:
            raise UnusableDataError("clients: expected the data of at least one client, got none")
        named = dict(clients.items() if isinstance(clients, Mapping) else enumerate(clients))
        pairs = {f"clients[{name!r}]": _pair(data, f"clients[{name!r}]") for name, data in named.items()}
    else:
        named, pairs = {}, {"clients": _pair(clients, "clients")}
    tests = dict[str, Pair]()
    if isinstance(test, (int, float)):
        if not several or not 0 < test < 1:
            raise UnusableDataError(
                "test: a share of each client's own samples is a number between 0 and 1, where clients are a list or a "
                f"dict, got {test!r}; or give a pair (x, y)"
            )
        tests = _held_out(pairs, test)
    elif isinstance(test, Mapping):
        named, tests = dict(test), {f"test[{name!r}]": _pair(data, f"test[{name!r}]") for name, data in test.items()}
    given = {"test": None if tests else test, "validation": validation}
    others = {whose: _pair(data, whose) for whose, data in given.items() if data is not None}
    _require_alike(pairs | tests | others)
    (train, shares), testers = _joined(pairs), tuple[str, ...]()
    held_out = {whose: Dataset(*pair) for whose, pair in others.items()}
    if tests:
        testers, (pair, parts) = tuple(map(str, named)), _joined(tests)
        held_out["test"] = Dataset(*pair, domain_of=np.repeat(np.arange(len(parts)), list(map(len, parts))))
    if not len(train[1]):
        raise UnusableDataError("clients: expected samples, got none")
    return GivenData(
        Dataset(*train), held_out.get("test"), shares if several else None, held_out.get("validation"), testers
    )


def _require_alike(pairs: Mapping[str, Pair]) -> None:
    (first, (x, _)), *_ = pairs.items()
    for whose, (other, y) in pairs.items():
        if type(other) is not type(x) or describe(other) != describe(x):
            raise UnusableDataError(
                f"{whose} has samples of {describe(other)}, but {first} of {describe(x)}; make them alike"
            )
        if count(other) != len(y):
            raise UnusableDataError(
                f"{whose} has {count(other):,} samples, but {len(y):,} labels; expected a label for each sample"
            )


def _held_out(pairs: dict[str, Pair], share: float) -> dict[str, Pair]:
    """Take this share of each client's samples from what it trains on. The same samples are taken in every call."""
    _require_alike(pairs)
    out = dict[str, Pair]()
    for name, (x, y) in pairs.items():
        if (held := max(1, round(share * len(y)))) >= len(y):
            raise UnusableDataError(f"{name} has {len(y)} samples, too few to hold out {share:g} of them; give more")
        order = permutation(sha256(b"baffle/held out").digest(), len(y))
        rows, kept = np.sort(order[:held]), np.sort(order[held:])
        out[f"held out of {name}"], pairs[name] = (take(x, rows), y[rows]), (take(x, kept), y[kept])
    return out


def _joined(pairs: Mapping[str, Pair]) -> tuple[Pair, list[I64]]:
    """All samples one after the other, and which are whose."""
    labels = [y for _, y in pairs.values()]
    ends = np.cumsum(list(map(len, labels)))
    shares = [np.arange(end - len(y), end) for end, y in zip(ends, labels, strict=True)]
    return (joined([x for x, _ in pairs.values()]), np.concatenate(labels)), shares


def given_samples(x: Any, whose: str = "x") -> Samples:
    """Samples alone: an array, a tensor, a list, or a tuple or dict of them."""
    if isinstance(x, Mapping):
        return {str(name): _array(values, f"{whose}[{name!r}]") for name, values in x.items()}
    if isinstance(x, tuple):
        return tuple(_array(values, f"{whose}[{number}]") for number, values in enumerate(x))
    return _array(x, whose)


def _pair(data: Any, whose: str) -> tuple[Samples, Labels]:
    data = _loaded(data, whose)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        x, y = data
    elif not isinstance(data, (tuple, list, Mapping, str, bytes, np.ndarray)) and hasattr(data, "__getitem__"):
        x, y = _columns(data, whose)
    else:
        raise UnusableDataError(
            f"{whose}: expected a pair (x, y) of samples and targets, or a map-style data set of such pairs, got "
            f"{type(data).__name__}"
        )
    return given_samples(x, f"{whose}: x"), _array(y, f"{whose}: y")


def _loaded(data: Any, whose: str) -> Any:
    """The data set behind a DataLoader, whose batches and order the plan decides. Loaders are known by their parts:
    PyTorch may be missing."""
    if not hasattr(data, "dataset") or not hasattr(data, "collate_fn"):
        return data
    if getattr(data.collate_fn, "__name__", "") != "default_collate":
        raise UnusableDataError(
            f"{whose}: a DataLoader with a collate_fn of its own gives batches, not samples; give its data as (x, y)"
        )
    return data.dataset


def _item(item: Any) -> Any:
    """An item of a data set as a pair, if it is a dict with a label. A single other entry is the sample."""
    label = next((name for name in ("labels", "label") if isinstance(item, Mapping) and name in item), None)
    if label is None:
        return item
    x = {name: value for name, value in item.items() if name != label}
    return (next(iter(x.values())) if len(x) == 1 else x), item[label]


def _columns(data: Any, whose: str) -> tuple[Any, Any]:
    """The samples and the targets of a map-style data set."""
    if not hasattr(data, "__len__"):
        raise UnusableDataError(f"{whose}: a data set needs a length to be divided into samples; make it map-style")
    items = [_item(data[number]) for number in range(len(data))]
    if not all(isinstance(item, (tuple, list)) and len(item) == 2 for item in items):
        raise UnusableDataError(
            f"{whose}: expected items of a data set that are pairs (x, y), or dicts with a label, got "
            f"{type(items[0]).__name__}"
        )
    xs, ys = [x for x, _ in items], [y for _, y in items]
    if xs and isinstance(xs[0], dict):
        return {name: [x[name] for x in xs] for name in xs[0]}, ys
    if xs and isinstance(xs[0], tuple):
        return tuple(list(column) for column in zip(*xs, strict=True)), ys
    return xs, ys


def _array(values: Any, whose: str) -> Array:
    """Numbers as an array: floats in float32, integers and booleans as they are."""
    if isinstance(values, list) and values and hasattr(values[0], "detach"):
        values = [_from_tensor(value) for value in values]
    try:
        array = np.asarray(_from_tensor(values))
    except (TypeError, ValueError):
        raise UnusableDataError(
            f"{whose}: its entries have different shapes and cannot be one array; pad them to the same length"
        ) from None
    if array.dtype.kind not in "buif" or array.ndim == 0:
        raise UnusableDataError(
            f"{whose}: expected numbers whose first axis is the sample, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array


def _from_tensor(value: Any) -> Any:
    """A tensor's numbers; other values as they are. Tensors are known by their methods: PyTorch may be missing."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()
