"""CIFAR-10 and CIFAR-100 in their publisher's binary and Python formats, and CIFAR-10 as sheets of images."""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, I64, U8
from baffle.core.pixels import PixelScale
from baffle.core.seeds import keystream
from baffle.data.files import damaged, find, read_file, read_npz, read_whole, within
from baffle.data.images import decode
from baffle.data.sources import Dataset, Source
from baffle.errors import DataError

Part = Literal["train", "test"]
Images = tuple[U8, I64]  # with channels first, and their labels

SIDE = 32
PIXELS = 3 * SIDE * SIDE
SHEET = (40, 25)  # rows and columns of images on one sheet
MARGIN = 4  # the most pixels by which an image is shifted


@dataclass(frozen=True)
class Batches:
    """The names of a set's training and test files, and how many images each training and each test file holds."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    images: tuple[int, int]


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100: the names and contents of its files, and the scale of its pixels."""

    title: str
    name: str
    classes: int
    binary: Batches
    pickled: Batches
    labels_key: bytes
    bytes_of_labels: int  # before each image in the binary format; the last of them is the label
    scale: PixelScale
    sheets: Batches | None = None


_NUMBERED = tuple(f"data_batch_{i}" for i in range(1, 6))

CIFAR10 = Cifar(
    *("CIFAR-10", "cifar10", 10),
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
    *("CIFAR-100", "cifar100", 100),
    binary=Batches(("train.bin",), ("test.bin",), (50_000, 10_000)),
    pickled=Batches(("train",), ("test",), (50_000, 10_000)),
    labels_key=b"fine_labels",
    bytes_of_labels=2,
    scale=PixelScale(mean=(0.5071, 0.4867, 0.4408), deviation=(0.2675, 0.2565, 0.2761)),
)


def cifar10(folder: Path | None) -> Source:
    return read(CIFAR10, folder)


def cifar100(folder: Path | None) -> Source:
    return read(CIFAR100, folder)


def read(cifar: Cifar, folder: Path | None) -> Source:
    """Read the set in the first format that the folder holds. Pixels are scaled as the paper's authors do."""
    tar = cifar.title.lower()
    get_it = f"unpack {tar}-binary.tar.gz or {tar}-python.tar.gz (from www.cs.toronto.edu/~kriz/cifar.html)"
    mean, deviation = (
        np.array(numbers, np.float32)[:, None, None] for numbers in (cifar.scale.mean, cifar.scale.deviation)
    )

    def prepare(samples: NDArray[Any]) -> F32:
        scaled: F32 = samples.astype(np.float32) / np.float32(255)
        return (scaled - mean) / deviation

    def part(name: Part) -> Dataset:
        _, images_of = find(cifar.title, folder, cifar.name, get_it, partial(_reader, cifar))
        return Dataset(*images_of(name), prepare, augment=shifted_and_flipped if name == "train" else None)

    parts = (partial(part, "train"), partial(part, "test"))
    return Source(*parts, classes=cifar.classes, scale=cifar.scale, shape=(3, SIDE, SIDE))


def shifted_and_flipped(samples: NDArray[Any], key: bytes) -> NDArray[Any]:
    """Mirror images at random and shift them by up to four pixels each way, with reflected borders. One block of the
    key's stream decides about one image."""
    count, channels, height, width = samples.shape
    noise = keystream(key, range(1), 0, count).reshape(count, 16)
    down, right = (noise[:, i : i + 4].copy().view("<u4").astype(np.int64) % (2 * MARGIN + 1) for i in (0, 4))
    rows, columns = _reflected(down - MARGIN, height), _reflected(right - MARGIN, width)
    mirrored = noise[:, 8] % 2 == 1
    columns[mirrored] = columns[mirrored, ::-1]
    which, channel = np.arange(count)[:, None, None, None], np.arange(channels)[:, None, None]
    moved: NDArray[Any] = samples[which, channel, rows[:, None, :, None], columns[:, None, None, :]]
    return moved


def _reflected(shift: I64, size: int) -> I64:
    """The places of a line of pixels that is shifted, with reflected ends."""
    inside: I64 = (size - 1) - np.abs((size - 1) - np.abs(np.arange(size) + shift))
    return inside


def _reader(cifar: Cifar, where: Path) -> Callable[[Part], Images] | None:
    """A function that reads a part, in the first format of which the folder holds a file."""
    for subfolder in ("", *sorted(path.name for path in where.glob(f"{cifar.title.lower()}-*") if path.is_dir())):
        for batches, read_one in ((cifar.binary, _binary), (cifar.pickled, _pickled)):
            if any((where / subfolder / name).is_file() for name in batches.train + batches.test):
                return partial(_joined, cifar, read_one, where / subfolder, batches)
    if cifar.sheets and (where / "labels.npz").is_file():
        return partial(_sheets, cifar, where, cifar.sheets)
    return None


def _joined(
    cifar: Cifar, read_one: Callable[[Cifar, Path, int], Images], where: Path, batches: Batches, part: Part
) -> Images:
    names, count = (batches.train, batches.images[0]) if part == "train" else (batches.test, batches.images[1])
    parts = [read_one(cifar, where / name, count) for name in names]
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


def _sheets(cifar: Cifar, where: Path, sheets: Batches, name: Part) -> Images:
    rows, columns = SHEET
    names = sheets.train if name == "train" else sheets.test
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


# A pickle is a program that may call any function. Here it can call none: the three names of NumPy that an array needs
# become the records below, and every other name is refused.


class _Record:
    """A call that a pickle asks for and that is not made: its arguments, and the state that would be set."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype(_Record):
    __slots__ = ()


class _Array(_Record):
    __slots__ = ()


KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}

NEEDED = (  # the operations that occur in CIFAR's batches
    *(pickle.PROTO, pickle.MARK, pickle.STOP, pickle.GLOBAL, pickle.REDUCE, pickle.BUILD),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.BINSTRING, pickle.SHORT_BINSTRING, pickle.BINUNICODE, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
MOST_READS = 2_000_000  # parts that a pickle may have: each takes memory. CIFAR-100's have half a million.


class _Few(io.BytesIO):
    """A pickle's bytes, with a limit on the number of reads."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > MOST_READS:
            raise DataError(f"it has more than {MOST_READS:,} parts")
        return super().read(size)


# The unpickler written in Python: the one in C allocates whatever number of memo entries a pickle names.
class _Unpickler(pickle._Unpickler):
    dispatch = {code: pickle._Unpickler.dispatch[code] for (code,) in NEEDED}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise DataError(f"it asks for {module}.{name}")
        return KNOWN[module, name]


def _check_keys(code: int, keys: slice) -> None:
    """Refuse keys of dictionaries that are not strings: hashing deeply nested tuples can overflow the interpreter's
    stack. `keys` is their place on the unpickler's stack."""
    load = _Unpickler.dispatch[code]

    def checked(unpickler: Any) -> None:
        if not all(isinstance(key, bytes | str) for key in unpickler.stack[keys]):
            raise DataError("it has a dictionary whose keys are not strings")
        load(unpickler)

    _Unpickler.dispatch[code] = checked


_check_keys(pickle.SETITEM[0], slice(-2, -1))
_check_keys(pickle.SETITEMS[0], slice(None, None, 2))


def read_batch(path: Path, labels_key: bytes) -> tuple[U8, list[int]]:
    """The pixels, a row per image, and the labels of one pickled batch."""
    raw = _Few(read_file(path))
    try:
        batch = _Unpickler(raw, encoding="bytes").load()
    except DataError as refused:
        raise DataError(f"{path} is not a batch of CIFAR, and may be meant to do harm: {refused}; delete it") from None
    except Exception as fault:  # a hostile pickle can raise anything
        raise damaged(path, fault or type(fault).__name__) from None
    if not isinstance(batch, dict) or b"data" not in batch or labels_key not in batch:
        raise DataError(f"{path} is not a batch of CIFAR: expected data and {labels_key.decode()} in it")
    labels = batch[labels_key]
    if not isinstance(labels, list) or not all(type(label) is int and abs(label) < 2**31 for label in labels):
        raise DataError(f"{path}: expected {labels_key.decode()} to be a list of numbers; download it again")
    return _bytes_of(batch[b"data"], path), labels


def _bytes_of(array: Any, path: Path) -> U8:
    match array:
        case _Array(state=(_, (rows, columns), _Dtype(arguments=("u1" | b"u1", *_)), False, bytes(content))):
            if type(rows) is type(columns) is int and rows >= 0 <= columns and rows * columns == len(content):
                return np.frombuffer(content, np.uint8).reshape(rows, columns)
    raise DataError(f"{path}: expected data to be an array of bytes, a row per image; download it again")
