"""Untrusted archives: nothing is written outside, nothing in them runs, nothing grows without limit."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from baffle.data import files
from baffle.data.files import open_zip, read_file, read_member, read_npz, read_whole
from baffle.errors import DataError


def zipped_file(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_name_that_reaches_outside_is_refused(tmp_path: Path) -> None:
    for name in ("../x.png", "a/../../x.png", "/etc/x.png", "..\\x.png", "\\x.png", "C:/x.png", "c:\\x.png", "a/.."):
        path = zipped_file(tmp_path / "a.zip", {"photo/dog/1.png": b"", name: b""})
        with pytest.raises(DataError, match=r"a\.zip holds a member that reaches outside it"):
            open_zip(path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_an_archive_or_member_that_is_too_large_or_larger_than_it_declares_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zipped_file(tmp_path / "a.zip", {str(i): bytes(1000) for i in range(3)})
    for limit, most in (("LARGEST", 2999), ("LARGEST_MEMBER", 999)):
        monkeypatch.setattr(files, limit, most)
        with pytest.raises(DataError, match=f"would unpack to .*at most {most:,}"):
            open_zip(path)
    monkeypatch.undo()
    path = zipped_file(tmp_path / "a.zip", {"bomb": bytes(10_000_000)})
    size, small = (10_000_000).to_bytes(4, "little"), (10).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(size, small))
    with open_zip(path) as archive, pytest.raises(DataError, match=r"a\.zip: bomb is damaged"):
        read_member(archive, "bomb")


def test_an_encrypted_or_spoiled_member_is_named(tmp_path: Path) -> None:
    path = zipped_file(tmp_path / "a.zip", {"one": b"content"}, zipfile.ZIP_STORED)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"content", b"kontent"))
    with open_zip(path) as archive, pytest.raises(DataError, match=r"a\.zip: one is damaged .*CRC"):
        read_member(archive, "one")
    flag = whole.rindex(b"PK\x01\x02") + 8
    path.write_bytes(whole[:flag] + b"\x01" + whole[flag + 1 :])
    with open_zip(path) as archive, pytest.raises(DataError, match=r"a\.zip: one is damaged"):
        read_member(archive, "one")
    with open_zip(path) as archive, pytest.raises(DataError, match=r"a\.zip holds no two"):
        read_member(archive, "two")


@given(st.data())
def test_no_change_to_an_archive_does_more_than_spoil_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = zipped_file(tmp_path_factory.mktemp("zips") / "a.zip", {"a/b/c.png": b"content" * 20, "d": b""})
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        with open_zip(path) as archive:
            for name in archive.namelist():
                read_member(archive, name)
    except DataError:
        pass


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npz (is damaged|holds no x)"):
        read_npz(tmp_path / "a.npz", {"x": (None,)})
    with pytest.raises(DataError, match=r"b\.npz is damaged.*No such file"):
        read_npz(tmp_path / "b.npz", {"x": (None,)})


def npy_header(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header.encode() + b"\n"


def _saved(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def test_an_unexpected_array_is_refused(tmp_path: Path) -> None:
    for content in (
        b"",
        _saved(np.zeros((3, 4), np.uint8))[:-1],
        _saved(np.zeros((3, 4), np.int64)),
        *(_saved(np.zeros(shape, np.uint8)) for shape in ((3, 5), (0, 4), (4,))),
        _saved(np.array([{"a": print}], object)),
        npy_header("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000, 4)}"),
        npy_header("{'descr': '|u1', 'fortran_order': False, 'shape': (-3, 4)}"),
        npy_header("{'descr': '|V2000000000', 'fortran_order': False, 'shape': (3, 4)}"),
        npy_header("__import__('os').system('true')"),
        npy_header("(" * 5000),
    ):
        path = zipped_file(tmp_path / "a.npz", {"x.npy": content})
        with pytest.raises(DataError, match=r"a\.npz: x"):
            read_npz(path, {"x": (None, 4)})


def test_a_file_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_whole(tmp_path / "a", 5) == read_file(tmp_path / "a") == b"12345"
    with pytest.raises(DataError, match="a is truncated or damaged: expected 6 bytes, got 5"):
        read_whole(tmp_path / "a", 6)
    monkeypatch.setattr(files, "LARGEST_MEMBER", 4)
    for read in (read_file, lambda path: read_whole(path, 4)):
        with pytest.raises(DataError, match=r"a is damaged or cannot be read \(it is longer than 4 bytes\)"):
            read(tmp_path / "a")
