"""Files of keys: bounded, and private if they give away a secret."""

import re
from pathlib import Path

from baffle.errors import KeysError
from baffle.files import is_open_to_others, read_file

MOST_KEY_FILE_BYTES = 100_000
"""Of any file but the roster: a key, a certificate, a secret."""


def read(path: Path, most: int = MOST_KEY_FILE_BYTES) -> bytes:
    return _read(path, most)[0]


def read_private(path: Path) -> bytes:
    """A file that gives away a secret. It must be its owner's alone."""
    data, is_open = _read(path, MOST_KEY_FILE_BYTES)
    if is_open:
        raise KeysError(f"{path} can be read or changed by others than its owner; make it private: chmod 600 {path}")
    return data


def _read(path: Path, most: int) -> tuple[bytes, bool]:
    """A file's contents, and whether others than its owner can read or change them."""
    try:
        return read_file(path, most), is_open_to_others(path)
    except OSError as fault:
        raise KeysError(
            f"{path} cannot be read: {fault.strerror or fault}; expected a folder that `baffle keys new` made"
        ) from None


def only_line(path: Path, data: bytes, pattern: bytes, expected: str) -> str:
    """The one line of a file, without its end, if it matches the pattern."""
    line = data.removesuffix(b"\n")
    if not re.fullmatch(pattern, line):
        raise KeysError(f"{path} is not {expected}, as `baffle keys new` writes")
    return line.decode()
