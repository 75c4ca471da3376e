"""Images by domain and class: folders and zips in their publishers' layouts, and files that are refused."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from baffle.data import images as module, sources
from baffle.data.images import OFFICEHOME, PACS, Collection
from baffle.errors import DataError, PlanError
from tests.data.test_files import zipped_file
from tests.support.solid_images import eager

load, collected, image_set = eager(sources.load), eager(module.collected), eager(module.image_set)
officehome, pacs = eager(module.officehome), eager(module.pacs)


def _image(number: int, form: str = "png", size: tuple[int, int] = (6, 6), mode: str = "RGB") -> bytes:
    """An image of a single colour, determined by its number."""
    file = io.BytesIO()
    colour = number % 256 if mode == "L" else (number % 256, number // 256, 7)
    Image.new("RGB" if mode == "RGBA" else mode, size, colour).convert(mode).save(file, form)
    return file.getvalue()


def _members(collection: Collection, each: int = 5, form: str = "png") -> dict[str, bytes]:
    kinds = [f"class {i:02}" for i in range(collection.classes)]
    names = [f"{domain}/{kind}/{i:03}.{form}" for domain in collection.domains for kind in kinds for i in range(each)]
    return {name: _image(number, form) for number, name in enumerate(names)}


def _folder(path: Path, members: dict[str, bytes]) -> Path:
    for name, content in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("below", ["", "pacs/PACS/kfold"])
def test_a_folder_is_found_as_the_publisher_lays_it_out(tmp_path: Path, below: str) -> None:
    _folder(tmp_path / below, _members(PACS))
    source = pacs(tmp_path, 6)
    assert (len(source.train), len(source.test), source.classes, source.shape) == (112, 28, 7, (3, 6, 6))
    assert source.domains == ("art_painting", "cartoon", "photo", "sketch")


@pytest.mark.parametrize("prefix", ["", "a/b/"])
def test_a_zip_gives_what_the_folder_gives(tmp_path: Path, prefix: str) -> None:
    members = _members(OFFICEHOME)
    more = {"ImageInfo.csv": b"a,b", "__MACOSX/Art/x/._1.png": b"?", f"{prefix}Art/.DS_Store": b"?"}
    zipped = {prefix + name: content for name, content in reversed(members.items())} | more
    zipped_file(tmp_path / "zip" / "officehome" / "OfficeHome_10072016.zip", zipped)
    _folder(tmp_path / "folder", members | {"Art/.DS_Store": b"?", "Art/Thumbs.db/x": b"?"})
    from_zip, from_folder = officehome(tmp_path / "zip", 6), officehome(tmp_path / "folder", 6)
    assert from_zip.domains == from_folder.domains == ("Art", "Clipart", "Product", "Real World")
    assert from_zip.classes == 65
    for a, b in ((from_zip.train, from_folder.train), (from_zip.test, from_folder.test)):
        np.testing.assert_array_equal(a.samples, b.samples)
        np.testing.assert_array_equal(a.labels, b.labels)
        np.testing.assert_array_equal(a.domain_of, b.domain_of)


def test_a_domain_may_be_spelt_as_mirrors_do(tmp_path: Path) -> None:
    members = {name.replace("Real World", "real_World"): content for name, content in _members(OFFICEHOME).items()}
    source = officehome(_folder(tmp_path, members), 6)
    assert source.domains == OFFICEHOME.domains
    assert source.train.domain_of is not None
    assert set(source.train.domain_of.tolist()) == {0, 1, 2, 3}


def test_every_image_keeps_its_label_and_domain_and_a_fifth_of_every_group_is_held_out(tmp_path: Path) -> None:
    source = pacs(zipped_file(tmp_path / "pacs.zip", _members(PACS, each=11)).parent, 6)
    seen = list[int]()
    for part, each in ((source.train, 9), (source.test, 2)):
        assert part.domain_of is not None
        number = part.samples[:, 0, 0, 0].astype(int) + 256 * part.samples[:, 1, 0, 0].astype(int)
        np.testing.assert_array_equal(part.domain_of, number // 77)
        np.testing.assert_array_equal(part.labels, number // 11 % 7)
        np.testing.assert_array_equal(np.bincount(part.domain_of * 7 + part.labels), [each] * 28)
        seen += number.tolist()
    assert sorted(seen) == list(range(28 * 11))
    again = pacs(tmp_path, 6)
    np.testing.assert_array_equal(source.test.samples, again.test.samples)


@pytest.mark.parametrize(("form", "mode"), [("png", "RGBA"), ("png", "L"), ("jpeg", "RGB"), ("webp", "RGB")])
def test_images_of_any_kind_and_size_become_squares_of_colours(tmp_path: Path, form: str, mode: str) -> None:
    members = {f"a/b/{i}.{form}": _image(200, form, (20 + i, 9), mode) for i in range(5)}
    source = image_set(_folder(tmp_path, members), 8)
    assert source.train.samples.shape == (4, 3, 8, 8)
    assert np.abs(source.train.samples[:, 0].astype(int) - 200).max() <= 4
    shown = source.train.batch(np.arange(4)).x
    assert shown.dtype == np.float32
    np.testing.assert_allclose(shown, source.train.samples / 127.5 - 1, atol=1e-6)


def test_a_grey_image_of_16_bits_keeps_its_brightness_and_a_folder_in_place_of_an_image_is_named(
    tmp_path: Path,
) -> None:
    deep = np.array([[0, 257 * 100], [257 * 200, 65535]], np.uint16)
    file = io.BytesIO()
    Image.fromarray(deep).save(file, "png")
    source = image_set(_folder(tmp_path, {f"a/b/{i}.png": file.getvalue() for i in range(5)}), 2)
    np.testing.assert_array_equal(source.train.samples[0], [[[0, 100], [200, 255]]] * 3)
    (tmp_path / "a" / "b" / "6.png").mkdir()
    with pytest.raises(DataError, match=r"6\.png is damaged or cannot be read"):
        image_set(tmp_path, 8)


def test_a_plan_chooses_the_size_of_images_and_without_pillow_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path, _members(PACS))
    assert load("pacs", tmp_path).shape == (3, 128, 128)
    assert load("pacs", tmp_path, 10).shape == (3, 10, 10)
    with pytest.raises(PlanError, match=r"task\.pixels: only pacs and officehome can have a size, not mnist"):
        load("mnist", tmp_path, 10)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"Pillow: pip install 'baffle\[images\]'"):
        pacs(tmp_path)


@pytest.mark.parametrize(("name", "says"), [("pacs", "project_iccv2017"), ("officehome", "officeHomeDataset")])
def test_a_missing_set_says_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.delenv("BAFFLE_DATA", raising=False)
    for folder in (None, tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match=rf"{says}.*into a folder {name}"):
            load(name, folder)


def test_a_set_with_other_domains_or_classes_is_refused(tmp_path: Path) -> None:
    members = _members(PACS)
    for missing, got in (("sketch", "7 in art_painting, cartoon, photo$"), ("class 06", "6 in")):
        zipped_file(tmp_path / "pacs.zip", {name: content for name, content in members.items() if missing not in name})
        with pytest.raises(DataError, match=rf"not all of PACS: expected 7 classes .*got {got}"):
            pacs(tmp_path)
    with pytest.raises(DataError, match="holds no images"):
        collected(OFFICEHOME, zipped_file(tmp_path / "officehome.zip", members).parent, 8)


def test_an_archive_laid_out_in_another_way_is_refused(tmp_path: Path) -> None:
    for names, says in (
        ((), "holds no images"),
        (("a/b/c.txt",), "holds no images"),
        (("a/b.png",), "expected domain/class/name, got a/b.png"),
        (("a/b/c.png", "x/a/b/d.png"), "in one folder, got 2 folders"),
        (("a/b/c.png",), "holds too few images"),
        (("../b/c.png",), "reaches outside"),
    ):
        path = zipped_file(tmp_path / "a.zip", dict.fromkeys(names, _image(0)))
        with pytest.raises(DataError, match=rf"a\.zip.*{says}"):
            image_set(path, 8)


NO_IMAGES = {
    "nothing": b"",
    "half an image": _image(0, size=(300, 300))[:120],
    "a program for a printer": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(touch made) system\n",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
}


@pytest.mark.parametrize("kind", NO_IMAGES)
def test_a_file_that_is_not_an_image_is_named(tmp_path: Path, kind: str) -> None:
    members = {f"a/b/{i}.png": _image(i) for i in range(5)} | {"a/b/bad.png": NO_IMAGES[kind]}
    for path in (zipped_file(tmp_path / "a.zip", members), _folder(tmp_path / "a", members)):
        with pytest.raises(DataError, match=r"a/b/bad\.png is damaged"):
            image_set(path, 8)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PIXELS", 35)
    with pytest.raises(DataError, match=r"0\.png: 6 × 6 pixels, expected at most 35"):
        image_set(_folder(tmp_path, {f"a/b/{i}.png": _image(i) for i in range(5)}), 8)
