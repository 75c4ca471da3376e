"""Data sets: files are read, samples are scaled for a model, and damaged or missing files are refused. A part of a
source is checked once, when it is read."""

import gzip
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.datasets import load_digits

from baffle.core.arrays import F32, U8
from baffle.core.pixels import PixelScale
from baffle.core.samples import shape_of
from baffle.data import sources
from baffle.data.files import read_idx
from baffle.data.handwriting import digits
from baffle.data.sources import Dataset, Source
from baffle.errors import DataError, PlanError, UnusableDataError
from tests.support.solid_images import eager

load = eager(sources.load)

FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def _idx(array: U8) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@pytest.fixture
def small_mnist(tmp_path: Path) -> Path:
    """Four well-formed files of a few samples."""
    random = np.random.default_rng(0)
    (tmp_path / "mnist").mkdir()
    for name, count in zip(FILES, (12, 12, 5, 5), strict=True):
        images = name.endswith("idx3")
        array = random.integers(0, 256 if images else 10, (count, 28, 28) if images else count).astype(np.uint8)
        (tmp_path / "mnist" / f"{name}-ubyte.gz").write_bytes(gzip.compress(_idx(array)))
    return tmp_path


def test_digits_are_scikit_learns_with_a_fixed_fifth_held_out_and_shown_at_unit_variance() -> None:
    source, again, whole = digits(), digits(), load_digits()
    assert (len(source.train), len(source.test), source.classes, source.shape) == (1438, 359, 10, (1, 8, 8))
    for part, same in ((source.train, again.train), (source.test, again.test)):
        np.testing.assert_array_equal(part.samples, same.samples)
        np.testing.assert_array_equal(part.labels, same.labels)
    samples = np.concatenate([source.train.samples, source.test.samples]).reshape(1797, 64)
    labels = np.concatenate([source.train.labels, source.test.labels])
    expected = whole.images.reshape(1797, 64)
    order, expected_order = np.lexsort((*samples.T, labels)), np.lexsort((*expected.T, whole.target))
    np.testing.assert_array_equal(samples[order], expected[expected_order])
    np.testing.assert_array_equal(labels[order], whole.target[expected_order])
    batch = source.train.batch(np.arange(1438))
    assert [batch.x.dtype, batch.y.dtype] == ["float32", "int64"]
    assert abs(batch.x.mean()) < 0.02
    assert abs(batch.x.std() - 1) < 0.02
    train = source.train
    batch = train.batch(np.array([5, 0, 5]))
    np.testing.assert_array_equal(batch.y, train.labels[[5, 0, 5]])
    np.testing.assert_array_equal(batch.x[0], batch.x[2])
    np.testing.assert_allclose(batch.x[1, 0] * 0.376 + 0.305, train.samples[0] / 16, atol=1e-6)


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))), st.booleans())
def test_idx_files_are_read_back(tmp_path_factory: pytest.TempPathFactory, array: U8, zipped: bool) -> None:
    path = tmp_path_factory.mktemp("idx") / ("file.gz" if zipped else "file")
    path.write_bytes(gzip.compress(_idx(array)) if zipped else _idx(array))
    np.testing.assert_array_equal(read_idx(path, array.shape[1:]), array)


GOOD = _idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
ZIPPED = gzip.compress(GOOD, mtime=0)
CHANGED = ZIPPED[: len(ZIPPED) // 2] + bytes([ZIPPED[len(ZIPPED) // 2] ^ 1]) + ZIPPED[len(ZIPPED) // 2 + 1 :]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        *(
            ("file.gz", damaged, "download it again")
            for damaged in (ZIPPED[:-9], ZIPPED[:12], ZIPPED[:-12] + b"\0" * 12, CHANGED, GOOD)
        ),
        ("file.gz", b"", "expected magic 00000803"),
        ("file", b"", "expected magic 00000803, got"),
        ("file", b"\0\0\x08\x01" + GOOD[4:], "expected magic 00000803, got 00000801"),
        ("file", b"\0\0\x0d\x03" + GOOD[4:], "got 00000d03"),
        ("file", GOOD[:9], r"expected \(3, 4\)"),
        ("file", bytes.fromhex("00000803 ffffffff 00000003 00000004"), r"promises 51,539,607,540 bytes, .*most 16"),
        ("file", GOOD[:-1], "truncated or damaged: expected 40 bytes for 2 items, got 39"),
        ("file", GOOD + b"\0", "truncated or damaged"),
        ("file", _idx(np.zeros((0, 3, 4), np.uint8)), "truncated or damaged"),
        ("file", _idx(np.zeros((2, 4, 3), np.uint8)), r"shape \(4, 3\), expected \(3, 4\)"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as refused:
        read_idx(tmp_path / name, (3, 4))
    assert str(tmp_path / name) in str(refused.value)


def test_mnist_is_found_in_the_folder_below_it_and_through_the_environment_zipped_or_not(
    small_mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAFFLE_DATA", str(small_mnist))
    found = [load("mnist", small_mnist), load("mnist", small_mnist / "mnist"), load("mnist")]
    packed = small_mnist / "mnist" / "train-images-idx3-ubyte.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    for source in (*found, load("mnist")):
        assert (len(source.train), len(source.test), source.classes, source.shape) == (12, 5, 10, (1, 32, 32))
        np.testing.assert_array_equal(source.train.samples, found[0].train.samples)
    for folder in (small_mnist / "missing", small_mnist / "mnist" / "empty"):
        with pytest.raises(DataError, match=r"yann\.lecun\.com/exdb/mnist") as refused:
            load("mnist", folder)
        assert str(folder) in str(refused.value)

    for nothing in ("", None):
        monkeypatch.setenv("BAFFLE_DATA", "") if nothing == "" else monkeypatch.delenv("BAFFLE_DATA")
        with pytest.raises(DataError, match=r"yann\.lecun\.com/exdb/mnist.*--data.*BAFFLE_DATA"):
            load("mnist")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_of_mnist_is_named(small_mnist: Path, name: str) -> None:
    (small_mnist / "mnist" / f"{name}-ubyte.gz").unlink()
    with pytest.raises(DataError, match=name):
        load("mnist", small_mnist)


def test_labels_must_be_digits_and_as_many_as_images(small_mnist: Path) -> None:
    for labels, says in (
        (np.zeros(11, np.uint8), "12 train images but 11 labels"),
        (np.full(12, 10, np.uint8), "holds the label 10, expected 0 to 9"),
    ):
        (small_mnist / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(labels)))
        with pytest.raises(DataError, match=says):
            load("mnist", small_mnist)


def test_images_are_enlarged_as_torch_does_it(small_mnist: Path) -> None:
    train = load("mnist", small_mnist).train
    raw = torch.from_numpy(train.samples[:, None].astype(np.float32))
    wide = torch.nn.functional.interpolate(raw, size=(32, 32), mode="bilinear", align_corners=False)
    expected = (wide / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(train.batch(np.arange(12)).x, expected.numpy(), atol=2e-6)


def _qmnist(labels: U8, writers: list[int]) -> bytes:
    """QMNIST's labels: eight numbers per digit; the first is the digit, the third its writer."""
    rows = np.zeros((len(writers), 8), ">i4")
    rows[:, 0], rows[:, 2] = labels, writers
    sizes = b"".join(size.to_bytes(4, "big") for size in rows.shape)
    return gzip.compress(bytes([0, 0, 12, 2]) + sizes + rows.tobytes())


WRITERS = [7, 7, 3, 2599, 7, 3, 0, 0, 0, 7, 3, 3]


@pytest.mark.parametrize("below", ["mnist", "mnist/qmnist"])
def test_the_writers_of_mnist_are_known_if_qmnist_is_beside_it(small_mnist: Path, below: str) -> None:
    plain = load("mnist", small_mnist)
    assert plain.train.writer_of is None
    (small_mnist / below).mkdir(exist_ok=True)
    labels = plain.train.labels.astype(np.uint8)
    (small_mnist / below / "qmnist-train-labels-idx2-int.gz").write_bytes(_qmnist(labels, WRITERS))
    longer = np.concatenate([plain.test.labels, [1, 2]]).astype(np.uint8)
    (small_mnist / below / "qmnist-test-labels-idx2-int.gz").write_bytes(_qmnist(longer, [5, 6, 5, 6, 5, 9, 9]))
    source = load("mnist", small_mnist)
    np.testing.assert_array_equal(source.train.writer_of, WRITERS)
    np.testing.assert_array_equal(source.test.writer_of, [5, 6, 5, 6, 5])


def test_writers_of_other_digits_are_refused(small_mnist: Path) -> None:
    labels = load("mnist", small_mnist).train.labels.astype(np.uint8)
    path = small_mnist / "mnist" / "qmnist-train-labels-idx2-int.gz"
    other = labels.copy()
    other[3] = (other[3] + 1) % 10
    for content in (_qmnist(other, WRITERS), _qmnist(labels[:-1], WRITERS[:-1])):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"qmnist-train-labels-idx2-int\.gz does not belong to the MNIST files"):
            load("mnist", small_mnist)
    path.write_bytes(_qmnist(labels, WRITERS)[:-5])
    with pytest.raises(DataError, match=r"qmnist-train-labels-idx2-int\.gz is damaged"):
        load("mnist", small_mnist)


def _write_usps(path: Path, **changes: U8) -> None:
    random = np.random.default_rng(0)
    arrays = {"x_train": random.integers(0, 256, (8, 16, 16)), "y_train": np.arange(8)}
    arrays |= {"x_test": random.integers(0, 256, (3, 16, 16)), "y_test": np.arange(3)}
    path.parent.mkdir(exist_ok=True)
    saved: dict[str, Any] = {name: array.astype(np.uint8) for name, array in (arrays | changes).items()}
    np.savez(path, **saved)


@pytest.mark.parametrize("name", ["usps/usps.npz", "usps_uint8.npz"])
def test_usps_is_read_and_enlarged(tmp_path: Path, name: str) -> None:
    _write_usps(tmp_path / name)
    source = load("usps", tmp_path)
    assert (len(source.train), len(source.test), source.classes, source.shape) == (8, 3, 10, (1, 32, 32))
    np.testing.assert_array_equal(source.train.labels, np.arange(8))


def test_usps_that_is_missing_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no USPS in .*usps\.npz.*folder usps"):
        load("usps", tmp_path)
    for name, array, says in (
        ("y_test", np.zeros(4, np.uint8), r"usps\.npz: 3 test images but 4 labels"),
        ("y_test", np.full(3, 10, np.uint8), r"usps\.npz holds the label 10, expected 0 to 9"),
        ("x_test", np.zeros((3, 16, 15), np.uint8), r"x_test: expected n × 16 × 16 bytes, got uint8 of shape"),
    ):
        _write_usps(tmp_path / "usps.npz", **{name: array})
        with pytest.raises(DataError, match=says):
            load("usps", tmp_path)


REAL = {
    "mnist": (60_000, 10_000, 10, (1, 32, 32)),
    "usps": (7291, 2007, 10, (1, 32, 32)),
    "cifar10": (50_000, 10_000, 10, (3, 32, 32)),
    "pacs": (8003, 1988, 7, (3, 16, 16)),
}


@pytest.mark.parametrize("name", ["mnist", "usps", "cifar10", pytest.param("pacs", marks=pytest.mark.slow)])
def test_real_data(name: str, data_folder: Path) -> None:
    if not (data_folder / name).exists():
        pytest.skip(f"BAFFLE_DATA holds no {name}/")
    source = load(name, data_folder, 16 if name == "pacs" else 0)
    train = source.train
    assert (len(train), len(source.test), source.classes, source.shape) == REAL[name]
    np.testing.assert_array_equal(np.unique(train.labels), np.arange(source.classes))
    if name == "pacs":
        assert train.domain_of is not None
        assert (np.bincount(train.domain_of * 7 + train.labels, minlength=28) > 0).all()
    else:
        np.testing.assert_allclose(train.batch(np.arange(0, len(train), 10)).x.mean((0, 2, 3)), 0, atol=0.05)
    if name == "mnist" and (data_folder / "mnist" / "qmnist").exists():
        assert train.writer_of is not None
        counts = np.unique(train.writer_of, return_counts=True)[1]
        assert (len(counts), counts.min(), counts.max()) == (539, 19, 131)


def test_a_users_own_data_set_must_be_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "from baffle.data.handwriting import digits as source\n\ndef number():\n    return 5\n"
    (tmp_path / "own_data_of_a_user.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(load("own_data_of_a_user:source"), Source)
    with pytest.raises(DataError, match=r"own_data_of_a_user:number must return a baffle\.Source, got int"):
        load("own_data_of_a_user:number")
    with pytest.raises(PlanError, match="own_data_of_a_user:nothing cannot be imported"):
        load("own_data_of_a_user:nothing")


PIXELS = np.random.default_rng(0).random((20, 3, 4, 4), dtype=np.float32)
PIXELS[0, 0, 0] = 0, 0.5, 1, 1


def source_of(x: F32, scale: PixelScale | None = None) -> Source:
    data = Dataset(x, np.zeros(len(x), np.int64), lambda samples: samples)
    return Source(data, data, classes=2, scale=scale)


def test_pixels_lie_between_0_and_1_or_as_their_stated_scale_says() -> None:
    assert source_of(PIXELS).pixel_scale == PixelScale()
    for scale in (PixelScale((0.5,), (0.25,)), PixelScale((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))):
        mean, deviation = (np.array(numbers, np.float32)[:, None, None] for numbers in (scale.mean, scale.deviation))
        assert source_of((PIXELS - mean) / deviation, scale).pixel_scale == scale


def test_a_scale_that_the_samples_contradict_is_ignored() -> None:
    for centred_bytes_or_vectors in (PIXELS * 2 - 1, PIXELS * 255, PIXELS[:, 0, 0]):
        assert source_of(centred_bytes_or_vectors).pixel_scale is None
    assert source_of(PIXELS * 2 - 1, PixelScale((127.5,), (127.5,))).pixel_scale is None
    assert source_of(PIXELS, PixelScale((0.5, 0.5), (0.5, 0.5))).pixel_scale is None  # another number of channels


def test_a_part_is_read_and_checked_once_and_only_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Mock(wraps=sources._require_sound)
    monkeypatch.setattr(sources, "_require_sound", checked)
    train, test = (Mock(return_value=Dataset(PIXELS, np.zeros(len(PIXELS), np.int64))) for _ in range(2))
    source = Source(train, test, classes=2)
    for _ in range(3):
        source.train.batch(np.arange(3))
    assert (train.call_count, test.call_count, checked.call_count) == (1, 0, 1)
    assert len(source.test) == 20
    assert (train.call_count, test.call_count, checked.call_count) == (1, 1, 2)


def test_looking_for_values_that_are_not_finite_takes_little_memory() -> None:
    x = np.zeros((4000, 1000), np.float32)
    data = Dataset(x, np.zeros(len(x), np.int64))
    tracemalloc.start()
    Source(data, None, classes=2).train  # noqa: B018
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 8
    x[3999, 999] = np.nan
    with pytest.raises(UnusableDataError, match="first in sample 3999;"):
        Source(data, None, classes=2).train  # noqa: B018


@pytest.mark.parametrize(
    ("classes", "width", "label_shape"), [(4, 4, ()), (4, 4, (5,)), (0, 1, ()), (0, 1, (1,)), (0, 6, (2, 3))]
)
def test_how_many_outputs_a_model_needs(classes: int, width: int, label_shape: tuple[int, ...]) -> None:
    data = Dataset(np.zeros((6, 3), np.float32), np.zeros((6, *label_shape), np.int64 if classes else np.float32))
    source = Source(data, None, classes)
    assert (source.width, source.label_shape) == (width, label_shape)
    for stated in (source, Source(data, None, classes, shape=(3,), label_shape=label_shape)):
        example = stated.example(4)
        assert example.x.shape == (4, 3)
        assert example.y.shape == (4, *label_shape)
        assert example.y.dtype == (np.int64 if classes else np.float32)
    assert Source(None, None, 0, shape=(3,), width=7).example(2).y.shape == (2, 7)


def test_examples_of_several_inputs_are_samples() -> None:
    x = {"ids": np.arange(6), "numbers": np.linspace(0, 1, 12).reshape(6, 2)}
    source = Source(Dataset(x, np.arange(6) % 3), None, classes=3)
    assert source.shape == {"ids": (), "numbers": (2,)}
    example = source.example(8)
    assert shape_of(example.x) == source.shape
    assert example.x["ids"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert source.train.rows(np.array([4, 1])).batch(np.array([0])).x["ids"].tolist() == [4]


@given(samples=st.integers(10, 200))
def test_a_validation_split_takes_a_fifth_of_the_training_samples_and_never_reads_the_test_set(samples: int) -> None:
    def test() -> Dataset:
        raise AssertionError("the test set was read")

    x, domains = np.arange(samples, dtype=np.float32)[:, None], np.arange(samples) % 3
    train = Dataset(x, np.arange(samples) % 2, domain_of=domains)
    source = Source(train, test, 2, ("a", "b", "c")).validation()
    assert len(source.test) == samples // 5
    assert sorted([*source.train.samples.ravel(), *source.test.samples.ravel()]) == x.ravel().tolist()
    for part in (source.train, source.test):
        assert part.domain_of is not None
        np.testing.assert_array_equal(part.domain_of, part.samples.ravel() % 3)
    again = Source(train, None, 2).validation()
    np.testing.assert_array_equal(again.test.samples, source.test.samples)
    assert (source.shape, source.classes, source.domains) == ((1,), 2, ("a", "b", "c"))
