"""Data sets: files are read, samples are scaled for a model, and damaged or missing files are refused."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.datasets import load_digits

from baffle.core.arrays import U8
from baffle.data import sources
from baffle.data.handwriting import digits, mnist, usps
from baffle.data.idx import read_idx
from baffle.data.sources import SOURCES, Source
from baffle.errors import DataError, PlanError
from tests.support.whole_sources import eager

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


def test_digits_hold_out_a_fixed_fifth() -> None:
    source, again = digits(), digits()
    assert (len(source.train), len(source.test), source.classes) == (1438, 359, 10)
    assert source.shape == (1, 8, 8)
    for part, same in ((source.train, again.train), (source.test, again.test)):
        np.testing.assert_array_equal(part.samples, same.samples)
        np.testing.assert_array_equal(part.labels, same.labels)


def test_digits_share_no_sample_between_training_and_test() -> None:
    """They are scikit-learn's, all of them."""
    source, whole = digits(), load_digits()
    samples = np.concatenate([source.train.samples, source.test.samples]).reshape(1797, 64)
    labels = np.concatenate([source.train.labels, source.test.labels])
    expected = whole.images.reshape(1797, 64)
    order = np.lexsort((*samples.T, labels))
    expected_order = np.lexsort((*expected.T, whole.target))
    np.testing.assert_array_equal(samples[order], expected[expected_order])
    np.testing.assert_array_equal(labels[order], whole.target[expected_order])


def test_digits_are_shown_with_zero_mean_and_unit_variance() -> None:
    batch = digits().train.batch(np.arange(1438))
    assert batch.x.dtype == np.float32
    assert batch.y.dtype == np.int64
    assert abs(batch.x.mean()) < 0.02
    assert abs(batch.x.std() - 1) < 0.02


def test_a_batch_holds_the_samples_that_were_asked_for() -> None:
    train = digits().train
    batch = train.batch(np.array([5, 0, 5]))
    np.testing.assert_array_equal(batch.y, train.labels[[5, 0, 5]])
    np.testing.assert_array_equal(batch.x[0], batch.x[2])
    np.testing.assert_allclose(batch.x[1, 0] * 0.376 + 0.305, train.samples[0] / 16, atol=1e-6)


@given(
    hnp.arrays(np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))),
    st.booleans(),
)
def test_idx_files_are_read_back(tmp_path_factory: pytest.TempPathFactory, array: U8, zipped: bool) -> None:
    path = tmp_path_factory.mktemp("idx") / ("file.gz" if zipped else "file")
    path.write_bytes(gzip.compress(_idx(array)) if zipped else _idx(array))
    np.testing.assert_array_equal(read_idx(path, array.shape[1:]), array)


GOOD = _idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("file.gz", gzip.compress(GOOD, mtime=0)[:-9], "download it again"),
        ("file.gz", gzip.compress(GOOD, mtime=0)[:12], "download it again"),
        ("file.gz", GOOD, "download it again"),
        ("file.gz", gzip.compress(GOOD, mtime=0)[:-12] + b"\0" * 12, "download it again"),
        ("file.gz", b"", "expected magic 00000803"),
        ("file", b"", "expected magic 00000803, got"),
        ("file", b"\0\0\x08\x01" + GOOD[4:], "expected magic 00000803, got 00000801"),
        ("file", b"\0\0\x0d\x03" + GOOD[4:], "got 00000d03"),
        ("file", GOOD[:9], r"expected \(3, 4\)"),
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


def test_one_changed_byte_in_a_gzipped_file_is_noticed(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(GOOD))
    packed[len(packed) // 2] ^= 1
    (tmp_path / "file.gz").write_bytes(packed)
    with pytest.raises(DataError, match="download it again"):
        read_idx(tmp_path / "file.gz", (3, 4))


def test_a_missing_idx_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"file\.gz .*No such file"):
        read_idx(tmp_path / "file.gz", (3, 4))


@pytest.mark.parametrize("below", ["", "mnist"])
def test_mnist_is_found_in_the_folder_or_below_it(small_mnist: Path, below: str) -> None:
    source = load("mnist", small_mnist / below)
    assert (len(source.train), len(source.test), source.classes, source.shape) == (12, 5, 10, (1, 32, 32))


def test_mnist_is_read_unzipped_too(small_mnist: Path) -> None:
    packed = small_mnist / "mnist" / "train-images-idx3-ubyte.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    before = load("mnist", small_mnist).train.samples
    packed.unlink()
    np.testing.assert_array_equal(load("mnist", small_mnist).train.samples, before)


def test_mnist_is_found_through_the_environment(small_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAFFLE_DATA", str(small_mnist))
    assert len(load("mnist").train) == 12
    with pytest.raises(DataError):
        load("mnist", small_mnist / "elsewhere")


@pytest.mark.parametrize("value", [None, ""])
def test_without_any_folder_it_says_where_to_get_mnist(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("BAFFLE_DATA", raising=False)
    else:
        monkeypatch.setenv("BAFFLE_DATA", value)
    with pytest.raises(DataError, match=r"yann\.lecun\.com/exdb/mnist.*--data.*BAFFLE_DATA"):
        load("mnist")


def test_an_empty_or_missing_folder_is_named_and_says_where_to_get_mnist(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match=r"yann\.lecun\.com/exdb/mnist") as refused:
            load("mnist", folder)
        assert str(folder) in str(refused.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_of_mnist_is_named(small_mnist: Path, name: str) -> None:
    (small_mnist / "mnist" / f"{name}-ubyte.gz").unlink()
    with pytest.raises(DataError, match=name):
        load("mnist", small_mnist)


def test_labels_and_images_must_be_equally_many(small_mnist: Path) -> None:
    (small_mnist / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(np.zeros(11, np.uint8))))
    with pytest.raises(DataError, match="12 train images but 11 labels"):
        load("mnist", small_mnist)


def test_a_label_must_be_a_digit(small_mnist: Path) -> None:
    labels = np.array([9, 10, 0, 1, 2], np.uint8)
    (small_mnist / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(labels)))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz holds the label 10, expected 0 to 9"):
        load("mnist", small_mnist)


def test_images_are_enlarged_as_torch_does_it(small_mnist: Path) -> None:
    train = load("mnist", small_mnist).train
    raw = torch.from_numpy(train.samples[:, None].astype(np.float32))
    wide = torch.nn.functional.interpolate(raw, size=(32, 32), mode="bilinear", align_corners=False)
    expected = (wide / 255 - 0.1307) / 0.3081
    np.testing.assert_allclose(train.batch(np.arange(12)).x, expected.numpy(), atol=2e-6)


def test_real_mnist(data_folder: Path) -> None:
    source = mnist(data_folder)
    assert (len(source.train), len(source.test), source.classes, source.shape) == (60000, 10000, 10, (1, 32, 32))
    np.testing.assert_array_equal(np.unique(source.train.labels), np.arange(10))
    batch = source.train.batch(np.arange(0, 60000, 10))
    assert abs(batch.x.mean()) < 0.05
    assert abs(batch.x.std() - 1) < 0.1


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


def test_an_idx_file_that_declares_too_much_is_refused_without_reading_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes.fromhex("00000803 ffffffff 00000003 00000004"))
    with pytest.raises(DataError, match=r"its header promises 51,539,607,540 bytes, expected at most 16; download"):
        read_idx(tmp_path / "file", (3, 4))


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
    _write_usps(tmp_path / "usps.npz", y_test=np.zeros(4, np.uint8))
    with pytest.raises(DataError, match=r"usps\.npz: 3 test images but 4 labels"):
        load("usps", tmp_path)
    _write_usps(tmp_path / "usps.npz", y_test=np.full(3, 10, np.uint8))
    with pytest.raises(DataError, match=r"usps\.npz holds the label 10, expected 0 to 9"):
        load("usps", tmp_path)
    _write_usps(tmp_path / "usps.npz", x_test=np.zeros((3, 16, 15), np.uint8))
    with pytest.raises(DataError, match=r"usps\.npz: x_test: expected n × 16 × 16 bytes, got uint8 of shape"):
        load("usps", tmp_path)


def test_real_usps_and_the_writers_of_real_mnist(data_folder: Path) -> None:
    if not (data_folder / "usps").exists() or not (data_folder / "mnist" / "qmnist").exists():
        pytest.skip("BAFFLE_DATA holds no usps/ or no mnist/qmnist/")
    source = usps(data_folder)
    assert (len(source.train), len(source.test)) == (7291, 2007)
    shown = source.train.batch(np.arange(7291)).x
    assert abs(shown.mean()) < 0.02
    writers = mnist(data_folder).train.writer_of
    assert writers is not None
    counts = np.unique(writers, return_counts=True)[1]
    assert (len(counts), counts.min(), counts.max()) == (539, 19, 131)


def test_an_unknown_data_set_is_refused_with_a_list_of_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"task\.data.*digits, mnist.*'cifar'"):
        load("cifar")
    assert set(SOURCES) == {"digits", "mnist", "usps", "cifar10", "cifar100", "pacs", "officehome"}


OWN = """
from baffle.data.handwriting import digits as source

def number():
    return 5

def broken():
    raise RuntimeError("no")
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_data_of_a_user.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_data_of_a_user"


def test_a_users_own_data_set(own_module: str) -> None:
    assert isinstance(load(f"{own_module}:source"), Source)


def test_a_users_own_data_set_must_be_a_source(own_module: str) -> None:
    with pytest.raises(DataError, match=rf"{own_module}:number must return a baffle\.Source, got int"):
        load(f"{own_module}:number")
    with pytest.raises(PlanError, match=f"{own_module}:nothing cannot be imported"):
        load(f"{own_module}:nothing")
