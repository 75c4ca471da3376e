"""Small files that would take gigabytes, or that claim to hold them: each is refused by name, in little memory. They go
through the functions that a plan's `task.data` calls."""

import bz2
import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baffle.data.cifar import cifar10
from baffle.data.handwriting import mnist, usps
from baffle.data.images import image_set
from baffle.errors import DataError
from tests.support.memory import at_most

LITTLE = 32 << 20
"""Bytes that reading any of these files may take."""

SMALL = 3 << 20
"""Bytes that any of these files may have."""


def npy(shape: str, kind: str = "|u1") -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


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


def usps_bomb(declared: int, size: int = 1 << 31) -> Callable[[Path], None]:
    """Images of two gigabytes."""
    start = npy(f"({size >> 8}, 16, 16)")
    return lambda folder: (folder / "usps.npz").write_bytes(  # type: ignore[return-value]
        archive_of(deflated_zeros(start, size), zipfile.ZIP_DEFLATED, declared or len(start) + size)
    )


def usps_bomb_by_bzip2(folder: Path) -> None:
    packed = bz2.compress(npy("(262144, 16, 16)") + bytes(1 << 26))
    (folder / "usps.npz").write_bytes(archive_of(packed, zipfile.ZIP_BZIP2, 1000))


def usps_header(shape: str, kind: str = "|u1") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with zipfile.ZipFile(folder / "usps.npz", "w") as archive:
            archive.writestr("x_train.npy", npy(shape, kind) + bytes(100))

    return write


def mnist_files(images: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "train-images-idx3-ubyte.gz").write_bytes(images)
        (folder / "train-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 1) + bytes(1))

    return write


def idx(items: int) -> bytes:
    return struct.pack(">BBBBIII", 0, 0, 8, 3, items, 28, 28)


def gzip_of_zeros(start: bytes, size: int) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as file:
        file.write(start)
        for _ in range(size >> 24):
            file.write(bytes(1 << 24))
    return packed.getvalue()


def plain_mnist(images: bytes, size: int = 0) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "train-images-idx3-ubyte"
        path.write_bytes(images)
        if size:
            with path.open("r+b") as file:
                file.truncate(size)

    return write


def cifar_batches(content: bytes, size: int = 0) -> Callable[[Path], None]:
    """Five batches, pickled or (with a size) binary and sparse."""

    def write(folder: Path) -> None:
        for number in range(1, 6):
            path = folder / (f"data_batch_{number}.bin" if size else f"data_batch_{number}")
            path.write_bytes(content)
            if size:
                with path.open("r+b") as file:
                    file.truncate(size)

    return write


CASES: dict[str, tuple[Callable[[Path | None], object], Callable[[Path], None]]] = {
    "npz bomb": (usps, usps_bomb(declared=0)),
    "npz bomb that declares little": (usps, usps_bomb(declared=1000)),
    "npz bomb by bzip2": (usps, usps_bomb_by_bzip2),
    "npy header of 2^60": (usps, usps_header("(4503599627370496, 16, 16)")),
    "npy header of 8 GB": (usps, usps_header("(33554432, 16, 16)")),
    "npy header of huge items": (usps, usps_header("(3, 16, 16)", "|V2000000000")),
    "npy header below zero": (usps, usps_header("(-3, -16, 16)")),
    "idx of 2^32 items": (mnist, mnist_files(gzip_of_zeros(idx(2**32 - 1), 1 << 26))),
    "gzipped idx of a gigabyte that is not there": (mnist, mnist_files(gzip.compress(idx(1_300_000)))),
    "plain idx of a gigabyte that is not there": (mnist, plain_mnist(idx(1_300_000))),
    "plain idx of a terabyte": (mnist, plain_mnist(idx(1_400_000_000), 1 << 40)),
    "cifar of a terabyte": (cifar10, cifar_batches(b"", 1 << 40)),
    "pickle of a million lists": (cifar10, cifar_batches(b"\x80\x02" + b"]" * 1_900_000 + b".")),
    "pickle that names a huge string": (cifar10, cifar_batches(b"\x80\x02T" + struct.pack("<i", 2**31 - 1) + b".")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_small_file_takes_little_memory(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, write = CASES[case]
    write(tmp_path)
    assert all(path.stat().st_blocks * 512 <= SMALL for path in tmp_path.iterdir()), "it is no small file"
    if "lists" in case:
        monkeypatch.setattr("baffle.data.pickles.MOST_READS", 100_000)
    with at_most(LITTLE), pytest.raises(DataError) as fault:
        load(tmp_path).train.samples.sum()  # type: ignore[attr-defined]
    assert str(tmp_path) in str(fault.value)


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
    names = [f"photo/dog/{number}.png" for number in range(5)]
    if zipped:
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            for name in names:
                archive.writestr(name, IMAGES[case])
    else:
        (tmp_path / "set" / "photo" / "dog").mkdir(parents=True)
        for name in names:
            (tmp_path / "set" / name).write_bytes(IMAGES[case])
    with at_most(LITTLE), pytest.raises(DataError, match=r"photo/dog/0\.png"):
        image_set(tmp_path / ("set.zip" if zipped else "set"), 32).train.samples.sum()


def test_a_deep_image_is_converted_row_by_row(tmp_path: Path) -> None:
    import PIL.Image

    from baffle.data.images import decode

    PIL.Image.fromarray(np.full((2000, 2000), 257 * 40, np.uint16)).save(tmp_path / "deep.png")
    with at_most(40 << 20):
        assert (decode(tmp_path / "deep.png") == 40).all()
