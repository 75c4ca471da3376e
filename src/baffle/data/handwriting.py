"""Handwritten digits: the small ones that lie in this package, MNIST (with QMNIST's writers), USPS."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, I64, U8
from baffle.core.pixels import PixelScale
from baffle.core.seeds import permutation
from baffle.data.dataset import Dataset, Source
from baffle.data.files import find, read_npz, with_or_without_gz, within
from baffle.data.idx import read_idx
from baffle.data.pixels import enlarged
from baffle.errors import DataError

DIGITS = PixelScale((0.305,), (0.376,))
MNIST = PixelScale((0.1307,), (0.3081,))
USPS = PixelScale((0.2545,), (0.3846,))

WRITER = 2
"""The column of QMNIST's labels that numbers the person who wrote the digit. Column 0 is the digit."""


def digits(_folder: Path | None = None) -> Source:
    """1,797 images of 8×8 pixels, as scikit-learn has them too; a fixed random fifth is held out."""

    def prepare(samples: NDArray[Any]) -> F32:
        pixels: F32 = samples[:, None].astype(np.float32) / np.float32(16)
        return (pixels - np.float32(DIGITS.mean[0])) / np.float32(DIGITS.deviation[0])

    def part(name: str) -> Dataset:
        images, labels = _all_digits()
        order = permutation(bytes(32), len(labels))
        held_out, rest = np.split(order, [len(order) // 5])
        chosen = held_out if name == "test" else rest
        return Dataset(images[chosen], labels[chosen], prepare)

    return Source(partial(part, "train"), partial(part, "test"), classes=10, scale=DIGITS, shape=(1, 8, 8))


def _all_digits() -> tuple[U8, I64]:
    path = Path(__file__).with_name("digits.npz")
    arrays = read_npz(path, {"images": (None, 8, 8), "labels": (None,)})
    return arrays["images"], within(arrays["labels"], 10, path)


def mnist(folder: Path | None) -> Source:
    """MNIST from its publisher's idx files, resized to 32×32 and scaled by its usual mean and deviation.

    Writers are known if QMNIST's label files lie beside the idx files, or in a folder qmnist there.
    """
    files = "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"
    get_it = f"put {files} (4 files, from yann.lecun.com/exdb/mnist or a mirror)"
    prepare = enlarged(28, 32, MNIST)

    def part(stem: str, stem_of_writers: str) -> Dataset:
        where, _ = find("MNIST", folder, "mnist", get_it, lambda place: _holds_mnist(place) or None)
        images = read_idx(with_or_without_gz(where / f"{stem}-images-idx3-ubyte"), (28, 28))
        labels_path = with_or_without_gz(where / f"{stem}-labels-idx1-ubyte")
        labels = within(read_idx(labels_path, ()), 10, labels_path)
        if len(images) != len(labels):
            raise DataError(f"{where}: {len(images)} {stem} images but {len(labels)} labels; download both files again")
        return Dataset(images, labels, prepare, writer_of=_writers(where, stem_of_writers, labels))

    train, test = partial(part, "train", "qmnist-train"), partial(part, "t10k", "qmnist-test")
    return Source(train, test, classes=10, scale=MNIST, shape=(1, 32, 32))


def usps(folder: Path | None) -> Source:
    """USPS from an npz file, resized from 16×16 to 32×32 and scaled by its mean and deviation."""
    get_it = "put usps.npz (uint8 arrays x_train n×16×16, y_train, x_test, y_test)"
    prepare = enlarged(16, 32, USPS)

    def part(name: str) -> Dataset:
        _, path = find("USPS", folder, "usps", get_it, lambda place: next(iter(sorted(place.glob("usps*.npz"))), None))
        arrays = read_npz(path, {f"x_{name}": (None, 16, 16), f"y_{name}": (None,)})
        images, labels = arrays[f"x_{name}"], within(arrays[f"y_{name}"], 10, path)
        if len(images) != len(labels):
            raise DataError(f"{path}: {len(images)} {name} images but {len(labels)} labels; download it again")
        return Dataset(images, labels, prepare)

    return Source(partial(part, "train"), partial(part, "test"), classes=10, scale=USPS, shape=(1, 32, 32))


def _holds_mnist(where: Path) -> bool:
    return any(with_or_without_gz(where / f"{stem}-images-idx3-ubyte").exists() for stem in ("train", "t10k"))


def _writers(where: Path, stem: str, labels: I64) -> I64 | None:
    """The writer of each digit, from QMNIST's labels, which must be of the same digits in the same order."""
    places = (with_or_without_gz(place / f"{stem}-labels-idx2-int") for place in (where, where / "qmnist"))
    path = next((place for place in places if place.exists()), None)
    if path is None:
        return None
    rows = read_idx(path, (8,), "ints")[: len(labels)].astype(np.int64)
    if len(rows) < len(labels) or (rows[:, 0] != labels).any():
        raise DataError(f"{path} does not belong to the MNIST files in {where}: its digits differ; download both again")
    return rows[:, WRITER]
