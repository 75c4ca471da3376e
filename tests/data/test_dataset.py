"""A source: its pixel scale, its labels and width, and that a part is checked once, when it is read."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from baffle.core.arrays import F32
from baffle.core.pixels import PixelScale
from baffle.core.samples import shape_of
from baffle.data import dataset
from baffle.data.dataset import Dataset, Source
from baffle.errors import UnusableDataError

PIXELS = np.random.default_rng(0).random((20, 3, 4, 4), dtype=np.float32)
PIXELS[0, 0, 0] = 0, 0.5, 1, 1


def source_of(x: F32, scale: PixelScale | None = None) -> Source:
    data = Dataset(x, np.zeros(len(x), np.int64), lambda samples: samples)
    return Source(data, data, classes=2, scale=scale)


def test_a_source_that_states_no_scale_has_pixels_from_0_to_1() -> None:
    assert source_of(PIXELS).pixel_scale == PixelScale()


@pytest.mark.parametrize("scale", [PixelScale((0.5,), (0.25,)), PixelScale((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))])
def test_a_stated_scale_is_accepted_if_it_gives_pixels_from_0_to_1(scale: PixelScale) -> None:
    mean, deviation = (np.array(numbers, np.float32)[:, None, None] for numbers in (scale.mean, scale.deviation))
    assert source_of((PIXELS - mean) / deviation, scale).pixel_scale == scale


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        (PIXELS * 2 - 1, None),
        (PIXELS * 255, None),
        (PIXELS * 2 - 1, PixelScale((127.5,), (127.5,))),
        (PIXELS, PixelScale((0.5, 0.5), (0.5, 0.5))),
        (PIXELS[:, 0, 0], None),
    ],
    ids=["centred, not said", "bytes", "in bytes", "another number of channels", "vectors"],
)
def test_a_scale_that_the_samples_contradict_is_ignored(x: F32, scale: PixelScale | None) -> None:
    assert source_of(x, scale).pixel_scale is None


def test_a_part_is_read_and_checked_once_and_only_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, read = list[str](), list[str]()
    require = dataset._require_sound

    def require_sound(data: Dataset, name: str, classes: int) -> None:
        checked.append(name)
        require(data, name, classes)

    monkeypatch.setattr(dataset, "_require_sound", require_sound)

    def part(name: str) -> Dataset:
        read.append(name)
        return Dataset(PIXELS, np.zeros(len(PIXELS), np.int64))

    source = Source(lambda: part("training"), lambda: part("test"), classes=2)
    for _ in range(3):
        source.train.batch(np.arange(3))
    assert (read, checked) == (["training"], ["training"])
    assert len(source.test) == 20
    assert (read, checked) == (["training", "test"], ["training", "test"])


def test_looking_for_values_that_are_not_finite_takes_little_memory() -> None:
    x = np.zeros((4000, 1000), np.float32)
    data = Dataset(x, np.zeros(len(x), np.int64))
    tracemalloc.start()
    Source(data, None, classes=2).train  # noqa: B018
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 8
    x[3999, 999] = np.nan
    with pytest.raises(UnusableDataError, match="first in sample 3999;"):
        Source(data, None, classes=2).train  # noqa: B018


@pytest.mark.parametrize(
    ("labels", "classes", "width", "label_shape"),
    [
        (np.zeros(6, np.int64), 4, 4, ()),
        (np.zeros((6, 5), np.int64), 4, 4, (5,)),
        (np.zeros(6), 0, 1, ()),
        (np.zeros((6, 1)), 0, 1, (1,)),
        (np.zeros((6, 2, 3)), 0, 6, (2, 3)),
    ],
    ids=["classes", "tokens", "a number", "a column", "a matrix"],
)
def test_how_many_outputs_a_model_needs(labels: Any, classes: int, width: int, label_shape: tuple[int, ...]) -> None:
    data = Dataset(np.zeros((6, 3), np.float32), labels)
    source = Source(data, None, classes)
    assert (source.width, source.label_shape) == (width, label_shape)
    for stated in (source, Source(data, None, classes, shape=(3,), label_shape=label_shape)):
        example = stated.example(4)
        assert example.x.shape == (4, 3)
        assert example.y.shape == (4, *label_shape)
        assert example.y.dtype == (np.int64 if classes else np.float32)
    assert Source(None, None, 0, shape=(3,), width=7).example(2).y.shape == (2, 7)


def test_examples_of_several_inputs_are_samples() -> None:
    x = {"ids": np.arange(6), "numbers": np.linspace(0, 1, 12).reshape(6, 2)}
    source = Source(Dataset(x, np.arange(6) % 3), None, classes=3)
    assert source.shape == {"ids": (), "numbers": (2,)}
    example = source.example(8)
    assert shape_of(example.x) == source.shape
    assert example.x["ids"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert source.train.rows(np.array([4, 1])).batch(np.array([0])).x["ids"].tolist() == [4]
