"""A few images of every data set, in the set's own format, and readers that read both parts at once."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import pytest
from PIL import Image

from baffle.core.arrays import I64, U8
from baffle.data import cifar
from baffle.data.images import OFFICEHOME, PACS, Collection
from baffle.data.sources import Source

SIDES = {"mnist": 28, "usps": 16, "cifar10": 32, "cifar100": 32}

PER_FILE = {"cifar10": (4, 4), "cifar100": (20, 4)}  # images in a CIFAR file: a published one has thousands


def colours(labels: I64) -> U8:
    """The colour of each label's images: red, green, blue. Black and white are among them."""
    red = labels * 37 % 256
    return np.stack([red, 255 - red, labels * 101 % 256], axis=1).astype(np.uint8)


def greys(labels: I64) -> U8:
    """The brightness of each label's images, if these have no colour."""
    return colours(labels)[:, 0]


def write_mnist(folder: Path) -> None:
    for stem in ("train", "t10k"):
        labels = np.arange(20) % 10
        write_idx(folder / "mnist" / f"{stem}-labels-idx1-ubyte", labels.astype(np.uint8))
        write_idx(folder / "mnist" / f"{stem}-images-idx3-ubyte", _grey(labels, SIDES["mnist"]))


def write_usps(folder: Path) -> None:
    labels = np.arange(20) % 10
    images = _grey(labels, SIDES["usps"])
    small: Any = labels.astype(np.uint8)
    (folder / "usps").mkdir()
    np.savez(folder / "usps" / "usps.npz", x_train=images, y_train=small, x_test=images, y_test=small)


def write_cifar(name: str, folder: Path) -> None:
    kind = {"cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100}[name]
    (folder / name).mkdir()
    for part, count in zip((kind.binary.train, kind.binary.test), PER_FILE[name], strict=True):
        for number, file in enumerate(part):
            labels = (np.arange(count) + count * number) % kind.classes
            pixels = np.repeat(colours(labels), SIDES[name] ** 2, axis=1)
            before = np.repeat(labels[:, None], kind.bytes_of_labels, axis=1).astype(np.uint8)
            (folder / name / file).write_bytes(np.concatenate([before, pixels], axis=1).tobytes())


def write_collection(collection: Collection, folder: Path, side: int = 32, form: str = "png") -> None:
    """Five images for every class of every domain, so that one of them is held out."""
    for label in range(collection.classes):
        red, green, blue = colours(np.array([label]))[0].tolist()
        file = io.BytesIO()
        Image.new("RGB", (side, side), (red, green, blue)).save(file, form)
        for domain in collection.domains:
            place = folder / collection.name / domain / f"class {label:02}"
            place.mkdir(parents=True)
            for number in range(5):
                (place / f"{number}.{form}").write_bytes(file.getvalue())


WRITERS: Mapping[str, Callable[[Path], None]] = {
    "digits": lambda _: None,
    "mnist": write_mnist,
    "usps": write_usps,
    "cifar10": lambda folder: write_cifar("cifar10", folder),
    "cifar100": lambda folder: write_cifar("cifar100", folder),
    "pacs": lambda folder: write_collection(PACS, folder),
    "officehome": lambda folder: write_collection(OFFICEHOME, folder),
}


def expect_small_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the readers of CIFAR take files of a few images for whole ones."""
    for constant, name in (("CIFAR10", "cifar10"), ("CIFAR100", "cifar100")):
        kind = getattr(cifar, constant)
        small = replace(kind, binary=replace(kind.binary, images=PER_FILE[name]))
        monkeypatch.setattr(cifar, constant, small)


def write_idx(path: Path, array: U8) -> None:
    path.parent.mkdir(exist_ok=True)
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def _grey(labels: I64, side: int) -> U8:
    return np.repeat(greys(labels), side * side).reshape(-1, side, side)


P = ParamSpec("P")


def eager(read: Callable[P, Source]) -> Callable[P, Source]:
    """The same reader, which reads the training and the test set before it returns."""

    @wraps(read)
    def read_both(*args: P.args, **kwargs: P.kwargs) -> Source:
        source = read(*args, **kwargs)
        assert source.train is source.train
        assert source.test is source.test
        return source

    return read_both
