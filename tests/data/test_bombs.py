"""Small files that would take gigabytes, or that claim to hold them: each is refused by name, in little memory. They go
through the functions that a plan's `task.data` calls."""

import bz2
import gzip
import io
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from baffle.data.cifar import cifar10
from baffle.data.handwriting import mnist, usps
from baffle.data.images import decode, image_set
from baffle.errors import DataError
from tests.data.test_files import npy_header
from tests.support.memory import at_most

LITTLE = 32 << 20  # bytes of memory that reading any of these files may take
SMALL = 3 << 20  # bytes that any of these files may have


def npy(shape: str, kind: str = "|u1") -> bytes:
    return npy_header(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}")


def deflated_zeros(start: bytes, size: int) -> bytes:
    """A stream of deflate that unpacks to `start` and this many zeros. A part that was flushed may be repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    part = packer.compress(bytes(1 << 24)) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + part * (size >> 24) + packer.flush()


def archive_of(packed: bytes, method: int, declared: int) -> bytes:
    """An archive with one member, which declares this size."""
    name = b"x_train.npy"
    about = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 0x21, 0, len(packed), declared, len(name), 0)
    member = b"PK\x03\x04" + about + name + packed
    entry = b"PK\x01\x02" + struct.pack("<H", 20) + about + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    return member + entry + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(entry), len(member), 0)


def usps_bomb(declared: int = 0, size: int = 1 << 31) -> bytes:
    """Images of two gigabytes, in an archive that declares this size."""
    start = npy(f"({size >> 8}, 16, 16)")
    return archive_of(deflated_zeros(start, size), zipfile.ZIP_DEFLATED, declared or len(start) + size)


def usps_bomb_by_bzip2() -> bytes:
    return archive_of(bz2.compress(npy("(262144, 16, 16)") + bytes(1 << 26)), zipfile.ZIP_BZIP2, 1000)


def usps_header(shape: str, kind: str = "|u1") -> bytes:
    content = npy(shape, kind) + bytes(100)
    return archive_of(content, zipfile.ZIP_STORED, len(content))


def idx(items: int) -> bytes:
    return struct.pack(">BBBBIII", 0, 0, 8, 3, items, 28, 28)


def gzip_of_zeros(start: bytes, size: int) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as file:
        file.write(start)
        for _ in range(size >> 24):
            file.write(bytes(1 << 24))
    return packed.getvalue()


USPS, MNIST, GZIPPED, CIFAR = "usps.npz", "train-images-idx3-ubyte", "train-images-idx3-ubyte.gz", "data_batch_1"

CASES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "npz bomb": (USPS, usps_bomb, 0),
    "npz bomb that declares little": (USPS, lambda: usps_bomb(declared=1000), 0),
    "npz bomb by bzip2": (USPS, usps_bomb_by_bzip2, 0),
    "npy header of 2^60": (USPS, lambda: usps_header("(4503599627370496, 16, 16)"), 0),
    "npy header of 8 GB": (USPS, lambda: usps_header("(33554432, 16, 16)"), 0),
    "npy header of huge items": (USPS, lambda: usps_header("(3, 16, 16)", "|V2000000000"), 0),
    "npy header below zero": (USPS, lambda: usps_header("(-3, -16, 16)"), 0),
    "idx of 2^32 items": (GZIPPED, lambda: gzip_of_zeros(idx(2**32 - 1), 1 << 26), 0),
    "gzipped idx of a gigabyte that is not there": (GZIPPED, lambda: gzip.compress(idx(1_300_000)), 0),
    "plain idx of a gigabyte that is not there": (MNIST, lambda: idx(1_300_000), 0),
    "plain idx of a terabyte": (MNIST, lambda: idx(1_400_000_000), 1 << 40),
    "cifar of a terabyte": (f"{CIFAR}.bin", lambda: b"", 1 << 40),
    "pickle of a million lists": (CIFAR, lambda: b"\x80\x02" + b"]" * 1_900_000 + b".", 0),
    "pickle that names a huge string": (CIFAR, lambda: b"\x80\x02T" + struct.pack("<i", 2**31 - 1) + b".", 0),
}
"""A file's name, how it begins, and the size to which it is stretched without taking room on the disk."""

READERS = {USPS: usps, MNIST: mnist, GZIPPED: mnist, CIFAR: cifar10, f"{CIFAR}.bin": cifar10}


@pytest.mark.parametrize("case", CASES)
def test_a_small_file_takes_little_memory(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, content, size = CASES[case]
    (tmp_path / name).write_bytes(content())
    if size:
        os.truncate(tmp_path / name, size)
    assert (tmp_path / name).stat().st_blocks * 512 <= SMALL, "it is no small file"
    monkeypatch.setattr("baffle.data.cifar.MOST_READS", 100_000)
    with at_most(LITTLE), pytest.raises(DataError) as fault:
        READERS[name](tmp_path).train.samples.sum()
    assert str(tmp_path / name) in str(fault.value)


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000), 9)
    ends = ((b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunk(*part) for part in (*chunks, *ends))


IMAGES = {
    "many pixels": png(60_000, 60_000),
    "more pixels than there are": png(2**31 - 1, 2**31 - 1),
    "a bomb in a profile": png(9000, 9000, (b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 28), 9))),
    "a bomb in a remark": png(9000, 9000, (b"zTXt", b"x\0\0" + zlib.compress(bytes(1 << 28), 9))),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("case", IMAGES)
def test_a_small_image_takes_little_memory(tmp_path: Path, case: str, zipped: bool) -> None:
    assert len(IMAGES[case]) <= SMALL
    (tmp_path / "set" / "photo" / "dog").mkdir(parents=True)
    for number in range(5):
        (tmp_path / "set" / "photo" / "dog" / f"{number}.png").write_bytes(IMAGES[case])
    path = Path(shutil.make_archive(str(tmp_path / "set"), "zip", tmp_path / "set")) if zipped else tmp_path / "set"
    with at_most(LITTLE), pytest.raises(DataError, match=r"photo/dog/0\.png"):
        image_set(path, 32).train.samples.sum()


def test_a_deep_image_is_converted_row_by_row(tmp_path: Path) -> None:
    PIL.Image.fromarray(np.full((2000, 2000), 257 * 40, np.uint16)).save(tmp_path / "deep.png")
    with at_most(40 << 20):
        assert (decode(tmp_path / "deep.png") == 40).all()
