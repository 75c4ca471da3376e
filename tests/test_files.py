"""A file is replaced whole or not at all, is its owner's alone, and is read only if it is not too long."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.files import ROOM, append, is_open_to_others, make_folder, read_file, replace, require_room
from tests.support.memory import at_most
from tests.support.small_disk import PAGE, small_disk


@given(st.lists(st.binary(max_size=100), min_size=1))
def test_a_file_holds_what_was_written_last(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("files") / "some.json"
    for content in contents:
        replace(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("step", ["open", "fsync", "rename"])
def test_when_it_fails_the_old_content_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "some.json"
    replace(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        owner = Path if step == "rename" else os
        broken.setattr(owner, {"open": "open", "fsync": "fsync", "rename": "replace"}[step], full)
        with pytest.raises(OSError, match="No space"):
            replace(path, b"new and longer")
    assert path.read_bytes() == b"old"
    replace(path, b"new and longer")  # what the failure left behind is in nobody's way
    assert path.read_bytes() == b"new and longer"


def test_what_has_no_room_is_not_appended_in_part(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.folder / "some.jsonl"
        append(path, b"one\n")
        disk.fill(leave=2)
        with pytest.raises(OSError, match="No space"):
            append(path, bytes(4 * PAGE))
        assert path.read_bytes() == b"one\n"
        disk.free()
        append(path, b"two\n")
        assert path.read_bytes() == b"one\ntwo\n"


def test_room_is_required_and_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.folder / "some.sqlite"
        path.touch()
        require_room(path)
        disk.fill(leave=ROOM // PAGE)
        require_room(path)
        disk.fill(leave=ROOM // PAGE - 1)
        with pytest.raises(OSError, match="No space"):
            require_room(path)
        assert sorted(file.name for file in disk.folder.iterdir()) == ["ballast", "some.sqlite"]


@pytest.fixture
def _careless() -> Iterator[None]:
    """A user whose files everybody can read and change unless a program says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_careless")
def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "folder"
    make_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / ".replaced.new").touch(mode=0o666)  # left behind when a process was killed
    replace(folder / "replaced", b"secret")
    append(folder / "appended", b"secret")
    for name in ("replaced", "appended"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert not is_open_to_others(folder / name)
    folder.chmod(0o750)
    make_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750, "what somebody has chosen stays"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_file_that_others_may_use_is_open_to_them(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "some.key"
    path.touch()
    path.chmod(mode)
    assert is_open_to_others(path)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "some"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="longer than 4 bytes"):
        read_file(path, 4)
    os.truncate(path, 1 << 40)  # takes no room on the disk
    with at_most(1 << 20), pytest.raises(OSError, match="longer than 1,073,741,824 bytes"):
        read_file(path, 1 << 30)


def test_a_file_takes_no_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    path = tmp_path / "some"
    path.write_bytes(bytes(1000))
    with at_most(1 << 20):
        assert read_file(path, 1 << 40) == bytes(1000)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros", "."):
        with pytest.raises(OSError, match="it is not a file"):
            read_file(tmp_path / name, 10)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing", 10)
