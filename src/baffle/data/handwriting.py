"""Handwritten digits: the small ones that come with this package, MNIST (with QMNIST's writers), and USPS."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, I64, U8
from baffle.core.pixels import PixelScale
from baffle.core.seeds import permutation
from baffle.data.files import find, read_idx, read_npz, with_or_without_gz, within
from baffle.data.sources import Dataset, Source
from baffle.errors import DataError

DIGITS = PixelScale((0.305,), (0.376,))
MNIST = PixelScale((0.1307,), (0.3081,))
USPS = PixelScale((0.2545,), (0.3846,))

SIDE = 32  # pixels a side, to which MNIST and USPS are enlarged
WRITER = 2  # the column of QMNIST's labels that numbers the person who wrote the digit; column 0 is the digit


def digits(_folder: Path | None = None) -> Source:
    """1,797 images of 8×8 pixels, the same as scikit-learn's. A fixed random fifth is held out."""

    def prepare(samples: NDArray[Any]) -> F32:
        pixels: F32 = samples[:, None].astype(np.float32) / np.float32(16)
        return (pixels - np.float32(DIGITS.mean[0])) / np.float32(DIGITS.deviation[0])

    def part(name: str) -> Dataset:
        images, labels = _all_digits()
        held_out, rest = np.split(permutation(bytes(32), len(labels)), [len(labels) // 5])
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
    prepare = _enlarged(28, MNIST)

    def look(place: Path) -> bool | None:
        stems = ("train", "t10k")
        return any(with_or_without_gz(place / f"{stem}-images-idx3-ubyte").exists() for stem in stems) or None

    def part(stem: str, stem_of_writers: str) -> Dataset:
        where, _ = find("MNIST", folder, "mnist", get_it, look)
        images = read_idx(with_or_without_gz(where / f"{stem}-images-idx3-ubyte"), (28, 28))
        labels_path = with_or_without_gz(where / f"{stem}-labels-idx1-ubyte")
        labels = within(read_idx(labels_path, ()), 10, labels_path)
        if len(images) != len(labels):
            raise DataError(f"{where}: {len(images)} {stem} images but {len(labels)} labels; download both files again")
        return Dataset(images, labels, prepare, writer_of=_writers(where, stem_of_writers, labels))

    train, test = partial(part, "train", "qmnist-train"), partial(part, "t10k", "qmnist-test")
    return Source(train, test, classes=10, scale=MNIST, shape=(1, SIDE, SIDE))


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


def usps(folder: Path | None) -> Source:
    """USPS from an npz file, resized from 16×16 to 32×32 and scaled by its mean and deviation."""
    get_it = "put usps.npz (uint8 arrays x_train n×16×16, y_train, x_test, y_test)"
    prepare = _enlarged(16, USPS)

    def part(name: str) -> Dataset:
        _, path = find("USPS", folder, "usps", get_it, lambda place: next(iter(sorted(place.glob("usps*.npz"))), None))
        arrays = read_npz(path, {f"x_{name}": (None, 16, 16), f"y_{name}": (None,)})
        images, labels = arrays[f"x_{name}"], within(arrays[f"y_{name}"], 10, path)
        if len(images) != len(labels):
            raise DataError(f"{path}: {len(images)} {name} images but {len(labels)} labels; download it again")
        return Dataset(images, labels, prepare)

    return Source(partial(part, "train"), partial(part, "test"), classes=10, scale=USPS, shape=(1, SIDE, SIDE))


def _enlarged(old: int, scale: PixelScale) -> Callable[[NDArray[Any]], F32]:
    """Resizes grey images of old × old bytes to SIDE × SIDE as image libraries do it (bilinear, pixel centres aligned),
    takes their pixels to [0, 1], then applies the scale."""
    centres = np.clip((np.arange(SIDE) + 0.5) * old / SIDE - 0.5, 0, old - 1)
    left = np.minimum(centres.astype(np.int64), old - 2)
    enlarge = np.zeros((SIDE, old), dtype=np.float32)
    enlarge[np.arange(SIDE), left] = 1 - (centres - left)
    enlarge[np.arange(SIDE), left + 1] = centres - left
    (mean,), (deviation,) = scale.mean, scale.deviation

    def prepare(samples: NDArray[Any]) -> F32:
        wide: F32 = enlarge @ samples.astype(np.float32) @ enlarge.T
        return ((wide / np.float32(255) - np.float32(mean)) / np.float32(deviation))[:, None]

    return prepare
