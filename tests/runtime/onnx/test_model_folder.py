"""Files of tensors: everything written is read back, and any damage raises a ModelError."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from baffle.errors import ModelError
from baffle.runtime.onnx.model_folder import MANIFEST, MODEL, read_manifest
from baffle.runtime.onnx.tensor_file import KINDS, MOST_HEADER_BYTES, Stored, read_stored, read_tensors, write_tensors
from tests.support.memory import at_most

BODY = bytes(range(24))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors") / "file.safetensors"


def _write(path: Path, header: bytes, body: bytes = BODY) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


def _entry(dtype: Any = "F32", shape: Any = (6,), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5),
        st.tuples(st.sampled_from(sorted(KINDS)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    st.integers(0, 99),
)
def test_all_tensors_come_back_each_at_a_multiple_of_its_items(
    path: Path, tensors: dict[str, tuple[str, list[int]]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    stored = dict[str, Stored]()
    for name, (kind, shape) in tensors.items():
        bits = random.integers(0, 2, (*shape, KINDS[kind].itemsize), np.uint8)
        stored[name] = Stored(kind, np.frombuffer(bits.tobytes(), KINDS[kind]).reshape(shape))
    write_tensors(path, stored)
    again = read_stored(path)
    assert {name: tensor.kind for name, tensor in again.items()} == {name: t.kind for name, t in stored.items()}
    for name, values in read_tensors(path).items():
        assert values.dtype == stored[name].values.dtype
        assert values.shape == stored[name].values.shape
        assert values.tobytes() == stored[name].values.tobytes()
        assert values.flags.aligned


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": _entry(shape=[2], offsets=[0, 8]), "b": _entry(shape=[5], offsets=[4, 24])}, "begins at byte 4"),
        ({"a": _entry(shape=[2], offsets=[0, 8]), "b": _entry(shape=[3], offsets=[12, 24])}, "begins at byte 12"),
        ({"a": _entry(shape=[5], offsets=[0, 20])}, "end at byte 20"),
        ({"a": _entry(shape=[2**40], offsets=[0, 2**42])}, "end at byte"),
        ({"a": _entry(shape=[2**40])}, "too few"),
        ({"a": _entry(shape=[2**62, 2**62, 0])}, "too many"),
        ({"a": _entry(shape=[-6])}, ">= 0"),
        ({"a": _entry(offsets=[-24, 0])}, ">= 0"),
        ({"a": _entry(offsets=[24, 0])}, "too few"),
        ({"a": _entry(offsets=[0, 24, 48])}, "length 2"),
        ({"a": _entry(offsets=[0, 2**80])}, "out of range|<="),
        ({"a": _entry(shape=[1] * 65)}, "length <= 64"),
        ({"a": _entry(shape="6")}, "array"),
        ({"a": _entry(dtype="F31")}, "unknown type F31"),
        ({"a": _entry(dtype=["F32"])}, "str"),
        ({"a": _entry("BOOL", [24])}, "neither true nor false"),
        ({"a": _entry() | {"more": 1}}, "unknown field"),
        ({"a": {}}, "missing"),
        ({"a": 5}, "object"),
        ({"a": _entry(), "__metadata__": {"a": 1}}, "str"),
        ([], "object"),
    ],
)
def test_a_hostile_header_is_refused(path: Path, header: object, says: str) -> None:
    _write(path, json.dumps(header).encode())
    with pytest.raises(ModelError, match=rf"file\.safetensors is not a sound safetensors file \(.*{says}"):
        read_tensors(path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"1234567",
        b"\xff" * 8 + b"{}",
        (3).to_bytes(8, "little") + b"{}",
        (5).to_bytes(8, "little") + b'{"\xff"',
        (100_004).to_bytes(8, "little") + b'{"a"' + b"[" * 100_000,
        (100_005).to_bytes(8, "little") + b'{"a":' + b"[" * 100_000,
        (500_000).to_bytes(8, "little") + b'{"a":' * 100_000,
    ],
    ids=["empty", "no length", "longest header", "cut header", "no UTF-8", "no JSON", "deep arrays", "deep objects"],
)
def test_a_file_of_another_form_is_refused(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(ModelError, match="not a sound safetensors file"):
        read_tensors(path)
    with pytest.raises(ModelError, match="not a sound safetensors file"):
        read_tensors(path.parent)


def test_metadata_are_not_a_tensor(path: Path) -> None:
    _write(path, json.dumps({"__metadata__": {"format": "pt"}, "a": _entry()}).encode())
    assert list(read_tensors(path)) == ["a"]


NUMBERS = st.one_of(st.integers(-30, 30), st.integers(), st.floats(allow_nan=False), st.text(max_size=2), st.none())
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(sorted(KINDS)), NUMBERS),
        "shape": st.one_of(st.lists(NUMBERS, max_size=4), NUMBERS),
        "data_offsets": st.one_of(st.lists(st.integers(-4, 30), min_size=2, max_size=2), st.lists(NUMBERS, max_size=3)),
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), st.one_of(ENTRIES, NUMBERS), max_size=4)


@settings(max_examples=300)
@given(st.one_of(HEADERS.map(lambda header: json.dumps(header).encode()), st.binary(max_size=60)), st.integers(-4, 4))
@example(json.dumps({"a": _entry()}).encode(), 0)
def test_any_file_is_read_or_refused_and_takes_no_more_memory_than_its_size(
    path: Path, header: bytes, shift: int
) -> None:
    path.write_bytes(max(0, len(header) + shift).to_bytes(8, "little") + header + BODY)
    try:
        tensors = read_tensors(path)
    except ModelError:
        return
    assert sum(values.nbytes for values in tensors.values()) <= path.stat().st_size
    starts = sorted((values.ctypes.data, values.nbytes) for values in tensors.values() if values.nbytes)
    assert all(start + size <= later for (start, size), (later, _) in itertools.pairwise(starts))


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 2**39, MOST_HEADER_BYTES + 1])
def test_a_file_that_claims_a_huge_header_takes_little_memory(path: Path, length: int) -> None:
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    os.truncate(path, 1 << 40)  # takes no room on the disk
    with at_most(1 << 20), pytest.raises(ModelError, match=f"expected a header of at most .* bytes, got {length}"):
        read_tensors(path)


def test_a_file_that_claims_huge_tensors_takes_little_memory(path: Path) -> None:
    _write(path, json.dumps({"a": _entry("U8", [2**40], [0, 2**40])}).encode())
    with at_most(1 << 20), pytest.raises(ModelError, match="tensors end at byte 1099511627776"):
        read_tensors(path)
    os.truncate(path, path.stat().st_size - len(BODY) + 2**40)
    with at_most(1 << 20), pytest.raises(ModelError, match="expected at most 8,589,934,592 bytes"):
        read_tensors(path)


def test_a_hostile_manifest_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / MODEL).touch()
    for content in (b"", b"\xff", b"[" * 1_000_000, b"{}", b"[]"):
        (tmp_path / MANIFEST).write_bytes(content)
        with at_most(8 << 20), pytest.raises(ModelError, match="holds no exported model"):
            read_manifest(tmp_path)
    os.truncate(tmp_path / MANIFEST, 1 << 40)
    with at_most(1 << 20), pytest.raises(ModelError, match="longer than"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).unlink()
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(ModelError, match="it is not a file"):
        read_manifest(tmp_path)
