"""Data sets: where their samples come from and what a model sees of them."""

import gzip
import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, I64, U8
from baffle.core.ports import Batch
from baffle.core.seeds import permutation
from baffle.errors import DataError
from baffle.plan import imported

Prepare = Callable[[NDArray[Any]], F32]
"""Stored samples → model input."""


@dataclass(frozen=True)
class Dataset:
    """Samples as they are stored, their labels, and how a batch of them becomes model input."""

    samples: NDArray[Any]
    labels: I64
    prepare: Prepare

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: I64) -> Batch:
        return Batch(self.prepare(self.samples[indices]), self.labels[indices])


@dataclass(frozen=True)
class Source:
    """A training and a test set of one kind."""

    train: Dataset
    test: Dataset
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample as a model sees it."""
        return self.train.batch(np.zeros(1, np.int64)).x.shape[1:]


def load(name: str, folder: Path | None = None) -> Source:
    """A data set by name, or a user's own as "package.module:function". `folder` defaults to $BAFFLE_DATA."""
    if ":" in name:
        made = imported(name)()
        if not isinstance(made, Source):
            raise DataError(f"task.data: {name} must return a baffle.Source, got {type(made).__name__}")
        return made
    if name not in SOURCES:
        raise DataError(f'task.data: expected one of {", ".join(SOURCES)} or "package.module:function", got {name!r}')
    return SOURCES[name](folder or _folder_from_environment())


def digits(_folder: Path | None = None) -> Source:
    """scikit-learn's 1,797 images of 8×8 pixels; a fixed random fifth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn: pip install 'baffle[demo]'") from None
    bunch = load_digits()
    images, labels = bunch.images.astype(np.uint8), bunch.target.astype(np.int64)
    order = permutation(bytes(32), len(labels))
    held_out, rest = np.split(order, [len(order) // 5])

    def prepare(samples: NDArray[Any]) -> F32:
        pixels: F32 = samples[:, None].astype(np.float32) / np.float32(16)
        return (pixels - np.float32(0.305)) / np.float32(0.376)

    return Source(
        Dataset(images[rest], labels[rest], prepare), Dataset(images[held_out], labels[held_out], prepare), classes=10
    )


def mnist(folder: Path | None) -> Source:
    """MNIST from its publisher's idx files, resized to 32×32 and scaled by its usual mean and deviation."""
    where = _mnist_folder(folder)
    enlarge = _bilinear(28, 32)

    def prepare(samples: NDArray[Any]) -> F32:
        wide: F32 = enlarge @ samples.astype(np.float32) @ enlarge.T
        return ((wide / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081))[:, None]

    def part(stem: str) -> Dataset:
        images = read_idx(_with_or_without_gz(where / f"{stem}-images-idx3-ubyte"), (28, 28))
        labels_path = _with_or_without_gz(where / f"{stem}-labels-idx1-ubyte")
        labels = read_idx(labels_path, ()).astype(np.int64)
        if len(images) != len(labels):
            raise DataError(f"{where}: {len(images)} {stem} images but {len(labels)} labels; download both files again")
        if labels.max(initial=0) > 9:
            raise DataError(f"{labels_path} holds the label {labels.max()}, expected 0 to 9; download it again")
        return Dataset(images, labels, prepare)

    return Source(part("train"), part("t10k"), classes=10)


SOURCES: dict[str, Callable[[Path | None], Source]] = {"digits": digits, "mnist": mnist}


def read_idx(path: Path, shape: tuple[int, ...]) -> U8:
    """An idx file of unsigned bytes, gzipped or not, whose items have the given shape."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as fault:
        raise DataError(f"{path} is damaged or cannot be read ({fault}); download it again") from None
    rank = 1 + len(shape)
    header = 4 + 4 * rank
    magic = bytes([0, 0, 8, rank])
    if raw[:4] != magic:
        raise DataError(
            f"{path} is not an idx file of unsigned bytes: expected magic {magic.hex()}, got {raw[:4].hex()}"
        )
    sizes = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, header, 4))
    if sizes[1:] != shape:
        raise DataError(f"{path} holds items of shape {sizes[1:]}, expected {shape}; is it another data set?")
    if len(raw) != header + math.prod(sizes) or not sizes[0]:
        raise DataError(
            f"{path} is truncated or damaged: expected {header + math.prod(sizes)} bytes for {sizes[0]} items, "
            f"got {len(raw)}; download it again"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(sizes)


def _folder_from_environment() -> Path | None:
    return Path(os.environ["BAFFLE_DATA"]) if os.environ.get("BAFFLE_DATA") else None


def _mnist_folder(folder: Path | None) -> Path:
    files = "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"
    get_it = (
        f"put {files} (4 files, from yann.lecun.com/exdb/mnist or a mirror) into a folder mnist and give its parent"
    )
    if folder is None:
        raise DataError(f"MNIST is not part of BAFFLE: {get_it} as --data FOLDER or $BAFFLE_DATA")
    for where in (folder / "mnist", folder):
        if any(_with_or_without_gz(where / f"{stem}-images-idx3-ubyte").exists() for stem in ("train", "t10k")):
            return where
    raise DataError(f"no MNIST in {folder}: {get_it}")


def _with_or_without_gz(path: Path) -> Path:
    return path if path.exists() else path.with_name(f"{path.name}.gz")


def _bilinear(old: int, new: int) -> F32:
    """The matrix that resizes a line of `old` pixels to `new`, as image libraries do it (pixel centres aligned)."""
    centres = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    left = np.minimum(centres.astype(np.int64), old - 2)
    matrix = np.zeros((new, old), dtype=np.float32)
    matrix[np.arange(new), left] = 1 - (centres - left)
    matrix[np.arange(new), left + 1] = centres - left
    return matrix
