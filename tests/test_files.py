"""A file is replaced whole or not at all."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baffle.files import ROOM, append, replace, require_room
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
        owner = os if step == "fsync" else Path
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
