"""CIFAR-10 and CIFAR-100 in their publisher's binary and Python formats, and CIFAR-10 as sheets of images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from baffle.core.arrays import I64, U8
from baffle.core.pixels import PixelScale
from baffle.data.dataset import Dataset, Source
from baffle.data.files import find, read_npz, read_whole, within
from baffle.data.images import decode
from baffle.data.pickles import read_batch
from baffle.data.pixels import normalised, shifted_and_flipped
from baffle.errors import DataError

SIDE = 32
PIXELS = 3 * SIDE * SIDE

SHEET = (40, 25)
"""Rows and columns of images on one sheet."""


@dataclass(frozen=True)
class Batches:
    """The names of a set's training and test files, and how many images each training and each test file holds."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    images: tuple[int, int]


@dataclass(frozen=True)
class Cifar:
    """One of the two sets: the names and contents of its files, and the scale of its pixels."""

    title: str
    name: str
    classes: int
    binary: Batches
    pickled: Batches
    labels_key: bytes
    bytes_of_labels: int
    """In the binary format these stand before each image; the last of them is the label."""
    scale: PixelScale
    sheets: Batches | None = None


_NUMBERED = tuple(f"data_batch_{i}" for i in range(1, 6))

CIFAR10 = Cifar(
    title="CIFAR-10",
    name="cifar10",
    classes=10,
    binary=Batches(tuple(f"{name}.bin" for name in _NUMBERED), ("test_batch.bin",), (10_000, 10_000)),
    pickled=Batches(_NUMBERED, ("test_batch",), (10_000, 10_000)),
    labels_key=b"labels",
    bytes_of_labels=1,
    scale=PixelScale(mean=(0.4914, 0.4822, 0.4465), deviation=(0.2023, 0.1994, 0.2010)),
    sheets=Batches(
        tuple(f"train_{i:02}.webp" for i in range(50)), tuple(f"test_{i:02}.webp" for i in range(10)), (1000, 1000)
    ),
)

CIFAR100 = Cifar(
    title="CIFAR-100",
    name="cifar100",
    classes=100,
    binary=Batches(("train.bin",), ("test.bin",), (50_000, 10_000)),
    pickled=Batches(("train",), ("test",), (50_000, 10_000)),
    labels_key=b"fine_labels",
    bytes_of_labels=2,
    scale=PixelScale(mean=(0.5071, 0.4867, 0.4408), deviation=(0.2675, 0.2565, 0.2761)),
)

Images = tuple[U8, I64]
"""Images with channels first, and their labels."""


def cifar10(folder: Path | None) -> Source:
    return read(CIFAR10, folder)


def cifar100(folder: Path | None) -> Source:
    return read(CIFAR100, folder)


def read(cifar: Cifar, folder: Path | None) -> Source:
    """Read the set in the first format that the folder holds. Pixels are scaled as by the paper's authors;
    training images can be augmented."""
    tar = cifar.title.lower()
    get_it = f"unpack {tar}-binary.tar.gz or {tar}-python.tar.gz (from www.cs.toronto.edu/~kriz/cifar.html)"
    prepare = normalised(cifar.scale)

    def part(name: Literal["train", "test"]) -> Dataset:
        _, parts = find(cifar.title, folder, cifar.name, get_it, partial(_parts, cifar))
        return Dataset(*parts[name](), prepare, augment=shifted_and_flipped if name == "train" else None)

    return Source(
        partial(part, "train"),
        partial(part, "test"),
        classes=cifar.classes,
        scale=cifar.scale,
        shape=(3, SIDE, SIDE),
    )


def _parts(cifar: Cifar, where: Path) -> dict[str, Callable[[], Images]] | None:
    """Functions that read the training and the test part, in the first format that the folder holds a file of."""
    for subfolder in ("", *sorted(path.name for path in where.glob(f"{cifar.title.lower()}-*") if path.is_dir())):
        for batches, read_file in ((cifar.binary, _binary), (cifar.pickled, _pickled)):
            if any((where / subfolder / name).is_file() for name in batches.train + batches.test):
                return {
                    "train": partial(_joined, cifar, read_file, where / subfolder, batches.train, batches.images[0]),
                    "test": partial(_joined, cifar, read_file, where / subfolder, batches.test, batches.images[1]),
                }
    if cifar.sheets and (where / "labels.npz").is_file():
        sheets = cifar.sheets
        return {
            "train": partial(_sheets, cifar, where, "train", sheets.train),
            "test": partial(_sheets, cifar, where, "test", sheets.test),
        }
    return None


def _joined(
    cifar: Cifar, read_file: Callable[[Cifar, Path, int], Images], where: Path, names: tuple[str, ...], count: int
) -> Images:
    parts = [read_file(cifar, where / name, count) for name in names]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _binary(cifar: Cifar, path: Path, count: int) -> Images:
    row = cifar.bytes_of_labels + PIXELS
    rows = np.frombuffer(read_whole(path, count * row), np.uint8).reshape(count, row)
    images, labels = rows[:, cifar.bytes_of_labels :], rows[:, cifar.bytes_of_labels - 1]
    return images.reshape(count, 3, SIDE, SIDE), within(labels, cifar.classes, path)


def _pickled(cifar: Cifar, path: Path, count: int) -> Images:
    images, labels = read_batch(path, cifar.labels_key)
    if images.shape != (count, PIXELS) or len(labels) != count:
        raise DataError(
            f"{path} is truncated or another set: expected {count} images of {PIXELS} bytes and {count} labels, got "
            f"{images.shape[0]} of {images.shape[1]} and {len(labels)}; download it again"
        )
    return images.reshape(count, 3, SIDE, SIDE), within(np.array(labels), cifar.classes, path)


def _sheets(cifar: Cifar, where: Path, name: str, names: tuple[str, ...]) -> Images:
    rows, columns = SHEET
    count = len(names) * rows * columns
    labels = read_npz(where / "labels.npz", {name: (count,)})[name]
    images = np.empty((count, 3, SIDE, SIDE), np.uint8)
    for i, sheet in enumerate(names):
        pixels = decode(where / sheet)
        if pixels.shape != (rows * SIDE, columns * SIDE, 3):
            raise DataError(
                f"{where / sheet}: expected {columns * SIDE} × {rows * SIDE} pixels, got {pixels.shape[1::-1]}"
            )
        tiles = pixels.reshape(rows, SIDE, columns, SIDE, 3).transpose(0, 2, 4, 1, 3)
        images[i * rows * columns : (i + 1) * rows * columns] = tiles.reshape(-1, 3, SIDE, SIDE)
    return images, within(labels, cifar.classes, where / "labels.npz")
