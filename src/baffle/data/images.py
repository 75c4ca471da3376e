"""Images in folders or zips, as domain/class/name: PACS, OfficeHome, or a user's own."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baffle.core.arrays import F32, I64, U8
from baffle.core.pixels import PixelScale
from baffle.core.seeds import permutation
from baffle.data.files import damaged, find, open_zip, read_file, read_member
from baffle.data.sources import Dataset, Source
from baffle.errors import DataError

if TYPE_CHECKING:
    import PIL.Image

FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP"}  # some others start programs in Pillow
MOST_PIXELS = 2**26  # that an image may have before it is resized
PUBLISHED_PIXELS = 128  # the size of images if a plan names none
ROWS = 64  # of an image that are converted at once
SCALE = PixelScale((0.5,), (0.5,))  # colours from -1 to 1, which suits models without a scale of their own


@dataclass(frozen=True)
class Collection:
    """A published set: its domains, the number of its classes, and where to get it."""

    title: str
    name: str
    domains: tuple[str, ...]
    classes: int
    get_it: str


PACS = Collection(
    *("PACS", "pacs", ("art_painting", "cartoon", "photo", "sketch"), 7),
    get_it="put its four folders of domains, or one zip of them (from dali-dl.github.io/project_iccv2017.html),",
)

OFFICEHOME = Collection(
    *("OfficeHome", "officehome", ("Art", "Clipart", "Product", "Real World"), 65),
    get_it="put its four folders of domains, or one zip of them (from www.hemanthdv.org/officeHomeDataset.html),",
)


class Image(NamedTuple):
    """An image to be read later: its domain, class and file name, its place for messages, and its reader."""

    domain: str
    kind: str
    name: str
    place: str
    read: Callable[[], bytes]


def collected(collection: Collection, folder: Path | None, pixels: int = PUBLISHED_PIXELS) -> Source:
    """A published set. Its files are looked for when samples are first needed."""

    def look(where: Path) -> Path | None:
        zips = (path for path in where.glob("*.zip") if _plain(path.name).startswith(_plain(collection.name)))
        for root in (where, *where.glob("*/"), *where.glob("*/*/")):
            if {_plain(name) for name in collection.domains} <= {_plain(path.name) for path in root.glob("*/")}:
                return root
        return min(zips, default=None)

    @cache
    def listing() -> Listing:
        _, path = find(collection.title, folder, collection.name, collection.get_it, look)
        return _listed(path, collection)

    return _source(listing, pixels, collection.classes, collection.domains)


pacs, officehome = partial(collected, PACS), partial(collected, OFFICEHOME)


def image_set(path: Path, pixels: int) -> Source:
    """Images of pixels × pixels from a folder or a zip of domain/class/name. A fixed fifth of every class of every
    domain is held out. Colours go from -1 to 1."""
    listing = _listed(path)
    return _source(lambda: listing, pixels, listing.classes, listing.domains)


def _source(listing: "Callable[[], Listing]", pixels: int, classes: int, domains: tuple[str, ...]) -> Source:
    train, test = (lambda: listing().part(pixels, held_out=False)), (lambda: listing().part(pixels, held_out=True))
    return Source(train, test, classes, domains, SCALE, shape=(3, pixels, pixels))


@dataclass(frozen=True)
class Listing:
    """The images of a set, to be read later."""

    images: list[Image]
    domains: tuple[str, ...]
    domain_of: I64
    classes: int
    labels: I64
    held_out: NDArray[np.bool_]

    def part(self, pixels: int, *, held_out: bool) -> Dataset:
        """The images that are held out, or the others, each decoded to pixels × pixels."""
        chosen = np.flatnonzero(self.held_out == held_out)
        samples = np.empty((len(chosen), 3, pixels, pixels), np.uint8)
        for i, number in enumerate(chosen):
            image = self.images[number]
            samples[i] = _decoded(image.read(), image.place, pixels).transpose(2, 0, 1)
        return Dataset(samples, self.labels[chosen], _from_minus_one_to_one, domain_of=self.domain_of[chosen])


def _listed(path: Path, collection: Collection | None = None) -> Listing:
    """List the images in a folder or a zip, and check that a published set is complete."""
    images = sorted(_in_zip(path) if path.is_file() else _in_folder(path), key=lambda image: image[:3])
    if collection:
        known = {_plain(name) for name in collection.domains}
        images = [image for image in images if _plain(image.domain) in known]
    domains, kinds = sorted({image.domain for image in images}), sorted({image.kind for image in images})
    if not images:
        raise DataError(f"{path} holds no images: expected domain/class/name, ending in {', '.join(FORMATS)}")
    if collection and (len(domains), len(kinds)) != (len(collection.domains), collection.classes):
        raise DataError(
            f"{path} is not all of {collection.title}: expected {collection.classes} classes in the domains "
            f"{', '.join(collection.domains)}, got {len(kinds)} in {', '.join(domains)}"
        )
    domain_of = np.array([domains.index(image.domain) for image in images], np.int64)
    labels = np.array([kinds.index(image.kind) for image in images], np.int64)
    held_out = _held_out(domain_of * len(kinds) + labels)
    if not held_out.any():
        raise DataError(f"{path} holds too few images: expected five or more in some class of some domain")
    return Listing(images, tuple(domains), domain_of, len(kinds), labels, held_out)


def decode(path: Path) -> U8:
    """The pixels of an image file: rows, columns, colours."""
    return _decoded(read_file(path), str(path), None)


def _decoded(raw: bytes, place: str, pixels: int | None) -> U8:
    """An image's pixels. With a size, the whole image is squeezed to a square of that size."""
    try:
        import PIL.Image
    except ImportError:
        raise DataError("reading images needs Pillow: pip install 'baffle[images]'") from None
    try:
        with PIL.Image.open(io.BytesIO(raw), formats=sorted(set(FORMATS.values()))) as image:
            if image.width * image.height > MOST_PIXELS:
                raise DataError(f"{place}: {image.width} × {image.height} pixels, expected at most {MOST_PIXELS:,}")
            colours = _in_eight_bits(image).convert("RGB")
            if pixels is not None and colours.size != (pixels, pixels):
                colours = colours.resize((pixels, pixels), PIL.Image.Resampling.BILINEAR)
            return np.asarray(colours)
    except DataError:
        raise
    except Exception as fault:  # Pillow can raise anything on a hostile image
        raise damaged(place, fault) from None


def _in_eight_bits(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """Convert a grey image of 16 bits a pixel and keep its brightness. Pillow would turn almost all of it white."""
    if not image.mode.startswith("I"):
        return image
    import PIL.Image

    deep = np.asarray(image)
    shallow = np.empty(deep.shape, np.uint8)
    for start in range(0, len(deep), ROWS):  # all at once would take 24 bytes a pixel
        rows = deep[start : start + ROWS].astype(np.int64)
        shallow[start : start + ROWS] = (rows + 128) // 257
    return PIL.Image.fromarray(shallow)


def _from_minus_one_to_one(samples: NDArray[Any]) -> F32:
    """The same as SCALE, written so that black and white are exact."""
    scaled: F32 = samples.astype(np.float32) / np.float32(127.5)
    return scaled - np.float32(1)


def _held_out(groups: I64) -> NDArray[np.bool_]:
    """A fixed random fifth of each group."""
    chosen = np.zeros(len(groups), dtype=bool)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        chosen[members[permutation(bytes(32), len(members))[: len(members) // 5]]] = True
    return chosen


def _in_folder(folder: Path) -> Iterator[Image]:
    for path in folder.glob("*/*/*"):
        name = PurePosixPath(path.relative_to(folder).as_posix())
        if _is_image(name):
            domain, kind, last = name.parts
            yield Image(domain, kind, last, str(path), partial(read_file, path))


def _in_zip(path: Path) -> Iterator[Image]:
    archive = open_zip(path)
    above = set[tuple[str, ...]]()
    for full in archive.namelist():
        name = PurePosixPath(full)
        if not _is_image(name):
            continue
        if len(name.parts) < 3:
            raise DataError(f"{path}: expected domain/class/name, got {full}")
        *folders, domain, kind, last = name.parts
        above.add(tuple(folders))
        yield Image(domain, kind, last, f"{path}: {full}", partial(read_member, archive, full))
    if len(above) > 1:
        raise DataError(f"{path}: expected all images as domain/class/name in one folder, got {len(above)} folders")


def _is_image(name: PurePosixPath) -> bool:
    hidden = any(part.startswith((".", "__MACOSX")) for part in name.parts)
    return name.suffix.lower() in FORMATS and not hidden


def _plain(name: str) -> str:
    """A name in lower case without separators, in which publishers and mirrors differ."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
