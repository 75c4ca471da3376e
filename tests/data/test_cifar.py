"""CIFAR in the three formats of its publisher and mirrors, and files that only pretend to be CIFAR."""

import io
import os
import pickle
import struct
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from baffle.core.arrays import I64, U8
from baffle.data import cifar as module
from baffle.data.cifar import CIFAR10, CIFAR100, Cifar, read_batch, shifted_and_flipped
from baffle.errors import DataError
from tests.support.solid_images import eager

read, cifar10, cifar100 = eager(module.read), eager(module.cifar10), eager(module.cifar100)

SMALL10 = replace(
    CIFAR10,
    binary=replace(CIFAR10.binary, images=(4, 3)),
    pickled=replace(CIFAR10.pickled, images=(4, 3)),
    sheets=replace(CIFAR10.sheets, train=("train_00.webp", "train_01.webp"), test=("test_00.webp",)),  # type: ignore[type-var]
)
SMALL100 = replace(
    CIFAR100, binary=replace(CIFAR100.binary, images=(7, 3)), pickled=replace(CIFAR100.pickled, images=(7, 3))
)

both = pytest.mark.parametrize("cifar", [SMALL10, SMALL100], ids=lambda cifar: cifar.name)


def _save_bytes(pickler: Any, content: bytes) -> None:
    pickler.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
    pickler.memoize(content)


class AsPython2Did(pickle._Pickler):
    """Writes bytes as strings of Python 2, like the published batches."""

    dispatch = pickle._Pickler.dispatch | {bytes: _save_bytes}


def _pickled(batch: object) -> bytes:
    file = io.BytesIO()
    AsPython2Did(file, protocol=2).dump(batch)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def _random(count: int, classes: int, seed: int) -> tuple[U8, I64]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 3, 32, 32)).astype(np.uint8), random.integers(0, classes, count)


def _write_binary(cifar: Cifar, folder: Path, name: str, images: U8, labels: I64) -> None:
    before = np.zeros((len(labels), cifar.bytes_of_labels), np.uint8)
    before[:, -1] = labels
    rows = np.concatenate([before, images.reshape(len(images), -1)], axis=1)
    (folder / name).write_bytes(rows.tobytes())


def _write_pickled(cifar: Cifar, folder: Path, name: str, images: U8, labels: I64) -> None:
    batch = {b"batch_label": b"one", b"data": images.reshape(len(images), -1), cifar.labels_key: labels.tolist()}
    (folder / name).write_bytes(_pickled(batch | {b"filenames": [b"a.png"] * len(labels)}))


WRITERS = {"binary": _write_binary, "pickled": _write_pickled}


def _written(cifar: Cifar, folder: Path, form: str) -> tuple[tuple[U8, I64], tuple[U8, I64]]:
    """Write a set's files in one format, and return their contents."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = getattr(cifar, form)
    parts = []
    for names, count in zip((batches.train, batches.test), batches.images, strict=True):
        written = [_random(count, cifar.classes, seed) for seed in range(len(names))]
        for name, (images, labels) in zip(names, written, strict=True):
            WRITERS[form](cifar, folder, name, images, labels)
        parts.append((np.concatenate([of for of, _ in written]), np.concatenate([of for _, of in written])))
    return parts[0], parts[1]


@both
@pytest.mark.parametrize("form", ["binary", "pickled"])
@pytest.mark.parametrize("below", ["", "{name}/{title}-batches", "{title}-any"])
def test_the_publishers_files_are_read_and_scaled(tmp_path: Path, cifar: Cifar, form: str, below: str) -> None:
    train, test = _written(cifar, tmp_path / below.format(name=cifar.name, title=cifar.title.lower()), form)
    source = read(cifar, tmp_path)
    assert (source.classes, source.shape) == (cifar.classes, (3, 32, 32))
    for part, (images, labels) in ((source.train, train), (source.test, test)):
        np.testing.assert_array_equal(part.samples, images)
        np.testing.assert_array_equal(part.labels, labels)
    shown = source.train.batch(np.array([2])).x[0]
    assert shown.dtype == np.float32
    mean, deviation = (np.array(of)[:, None, None] for of in (cifar.scale.mean, cifar.scale.deviation))
    np.testing.assert_allclose(shown * deviation + mean, source.train.samples[2] / 255, atol=1e-6)


def test_sheets_are_read_row_by_row(tmp_path: Path) -> None:
    images, labels = _random(3000, 10, 0)
    tiles = images.reshape(3, 40, 25, 3, 32, 32).transpose(0, 1, 4, 2, 5, 3).reshape(3, 1280, 800, 3)
    for name, sheet in zip(("train_00", "train_01", "test_00"), tiles, strict=True):
        Image.fromarray(sheet).save(tmp_path / f"{name}.webp", lossless=True, quality=0, method=0)
    digits = labels.astype(np.uint8)
    np.savez(tmp_path / "labels.npz", train=digits[:2000], test=digits[2000:])
    source = read(SMALL10, tmp_path)
    np.testing.assert_array_equal(source.train.samples, images[:2000])
    np.testing.assert_array_equal(source.test.samples, images[2000:])
    np.testing.assert_array_equal(source.test.labels, labels[2000:])

    Image.fromarray(tiles[0, :32]).save(tmp_path / "train_01.webp")
    with pytest.raises(DataError, match=r"train_01\.webp: expected 800 × 1280 pixels, got \(800, 32\)"):
        read(SMALL10, tmp_path)
    (tmp_path / "test_00.webp").write_bytes((tmp_path / "test_00.webp").read_bytes()[:1000])
    (tmp_path / "train_01.webp").write_bytes((tmp_path / "train_00.webp").read_bytes())
    with pytest.raises(DataError, match=r"test_00\.webp is damaged"):
        read(SMALL10, tmp_path)
    np.savez(tmp_path / "labels.npz", train=digits[:2000] + np.uint8(1), test=digits[2000:])
    with pytest.raises(DataError, match=r"labels\.npz holds the label 10, expected 0 to 9"):
        read(SMALL10, tmp_path)


def test_a_missing_set_says_where_to_get_it(tmp_path: Path) -> None:
    says = r"cifar-100?-binary\.tar\.gz or cifar-100?-python\.tar\.gz .*cs\.toronto\.edu/~kriz/cifar\.html"
    for load, folder in product((cifar10, cifar100), (None, tmp_path, tmp_path / "missing")):
        with pytest.raises(DataError, match=says):
            load(folder)


@both
@pytest.mark.parametrize("form", ["binary", "pickled"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_missing_truncated_or_longer_file_or_a_wrong_label_is_named(
    tmp_path: Path, cifar: Cifar, form: str, part: str
) -> None:
    _written(cifar, tmp_path, form)
    name = getattr(getattr(cifar, form), part)[-1]
    whole = (tmp_path / name).read_bytes()
    spoiled = [whole[:-1], whole[: len(whole) // 2], whole[: -len(whole) // 3], b""]
    for content in spoiled + ([whole + b"\0"] if form == "binary" else []):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.*download it again"):
            read(cifar, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name}.*No such file"):
        read(cifar, tmp_path)
    images, labels = _random(getattr(cifar, form).images[part == "test"], cifar.classes, 0)
    labels[1] = cifar.classes
    WRITERS[form](cifar, tmp_path, name, images, labels)
    with pytest.raises(DataError, match=rf"{name} holds the label {cifar.classes}, expected 0 to {cifar.classes - 1}"):
        read(cifar, tmp_path)


class Calls:
    """Asks its unpickler to call a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_cannot_call_anything(tmp_path: Path, protocol: int) -> None:
    for call in (os.system, os.mkdir, eval, np.empty, np.load):
        argument = str(tmp_path / "made") if call is os.mkdir else f"mkdir {tmp_path / 'made'}"
        (tmp_path / "batch").write_bytes(pickle.dumps({b"data": Calls(call, argument)}, protocol))
        with pytest.raises(DataError, match=r"batch is (not a batch of CIFAR, and may be meant to do harm|damaged)"):
            read_batch(tmp_path / "batch", b"labels")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch"]
    (tmp_path / "batch").write_bytes(pickle.dumps(Calls(os.system, "true"), 2))
    with pytest.raises(DataError, match=r"meant to do harm: it asks for posix\.system; delete it"):
        read_batch(tmp_path / "batch", b"labels")


PIXELS = np.zeros((2, 3072), np.uint8)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    arrays = (b"x" * 6144, PIXELS.astype(np.int16), PIXELS.ravel(), np.asfortranarray(PIXELS))
    for batch in (
        *(5, [], {b"data": PIXELS}, {b"labels": [1, 2]}),
        *({b"data": array, b"labels": [1, 2]} for array in arrays),
        *({b"data": PIXELS, b"labels": labels} for labels in ([1, "2"], [1, None], {b"1": 2})),
    ):
        (tmp_path / "batch").write_bytes(_pickled(batch))
        with pytest.raises(DataError, match=r"batch.*(expected|download it again)"):
            read_batch(tmp_path / "batch", b"labels")


HOSTILE = {
    "a memo of four billion entries": b"\x80\x02}r\xff\xff\xff\xff.",
    "keys nested without end": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "lists nested without end": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "an array that claims to be huge": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00tR.",
    "a class changed in place": b"\x80\x02cnumpy\ndtype\nNU\x01a}\x86b.",
    "a byte array of a terabyte": b"\x80\x05\x96\0\0\0\0\0\x01\0\0.",
    "a string of two gigabytes": b"\x80\x02T\xff\xff\xff\x7fabc.",
    "a string of negative length": b"\x80\x02T\xff\xff\xff\xffabc.",
    "nothing to stop at": b"\x80\x02}",
    "a protocol of the future": b"\x80\xff}.",
}


@pytest.mark.parametrize("lie", HOSTILE)
def test_a_hostile_pickle_is_refused(tmp_path: Path, lie: str) -> None:
    (tmp_path / "batch").write_bytes(HOSTILE[lie])
    with pytest.raises(DataError, match="batch"):
        read_batch(tmp_path / "batch", b"labels")


@given(st.data())
def test_no_change_to_a_pickle_does_more_than_spoil_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("pickles") / "batch"
    whole = bytearray(_pickled({b"labels": [1, 2], b"data": np.zeros((2, 2), np.uint8)}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        images, labels = read_batch(path, b"labels")
    except DataError:
        return
    assert images.dtype == np.uint8
    assert all(type(label) is int for label in labels)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 12))
def test_augmented_images_are_shifted_or_mirrored_originals(key: bytes, count: int) -> None:
    images = np.random.default_rng(count).integers(0, 256, (count, 3, 32, 32)).astype(np.uint8)
    moved = shifted_and_flipped(images, key)
    np.testing.assert_array_equal(shifted_and_flipped(images, key), moved)
    for image, other in zip(images, moved, strict=True):
        padded = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode="reflect")
        crops = [padded[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        assert any(np.array_equal(crop, other) or np.array_equal(crop[:, :, ::-1], other) for crop in crops)


def test_every_shift_and_both_sides_occur() -> None:
    places = np.arange(1024).reshape(1, 1, 32, 32).repeat(4000, 0)
    middle = shifted_and_flipped(places, bytes(32))[:, 0, 16, 15:17]
    rows, columns, flipped = middle[:, 0] // 32, middle.min(1) % 32, middle[:, 0] > middle[:, 1]
    for values, expected in ((rows, 9), (columns, 9), (flipped, 2)):
        counts = np.unique(values, return_counts=True)[1]
        assert len(counts) == expected
        assert counts.min() > 0.8 * 4000 / expected


def test_only_training_images_with_a_key_are_augmented(tmp_path: Path) -> None:
    _written(SMALL10, tmp_path, "binary")
    source, indices = read(SMALL10, tmp_path), np.arange(3)
    plain = source.train.batch(indices).x
    assert not np.array_equal(source.train.batch(indices, b"k" * 32).x, plain)
    np.testing.assert_array_equal(source.train.batch(indices).x, plain)
    np.testing.assert_array_equal(source.test.batch(indices, b"k" * 32).x, source.test.batch(indices).x)
