"""From files of images through `load_task` to the first layer of a model: every set with every model that fits it."""

import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from baffle.core.arrays import F32, I64
from baffle.core.samples import Array
from baffle.data.images import PACS, pacs
from baffle.data.sources import SOURCES, Dataset
from baffle.errors import PlanError
from baffle.models.build import build
from baffle.models.inputs import UNIT, Inputs
from baffle.models.mobilenet import find_weights, read_weights
from baffle.plan import MobileNet, Plan
from baffle.runtime.torch.model import TorchModel
from baffle.task.load import Task, load_task
from tests.support.mobilenet_weights import random_pairs, save_npz
from tests.support.solid_images import WRITERS, colours, expect_small_cifar, greys, write_collection

SIZED = ("pacs", "officehome")
GREY = ("digits", "mnist", "usps")

SCALES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "digits": ((0.305,), (0.376,)),
    "mnist": ((0.1307,), (0.3081,)),
    "usps": ((0.2545,), (0.3846,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "pacs": ((0.5,), (0.5,)),
    "officehome": ((0.5,), (0.5,)),
}
"""What docs/data.md promises: the mean and deviation of pixels in [0, 1] that each set subtracts and divides by."""

MODELS = {
    "lenet": 'task.model={name="lenet", channels=[4, 4]}',
    "wrn": 'task.model={name="wrn", widen=1}',
    "softmax": 'task.model={name="softmax"}',
    "mobilenet, random": 'task.model={name="mobilenet", weights="random", trained="all"}',
    "mobilenet, imagenet": 'task.model={name="mobilenet", trained="all"}',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of every data set, and weights of a MobileNet, in TensorFlow's form."""
    folder = tmp_path_factory.mktemp("data")
    for write in WRITERS.values():
        write(folder)
    save_npz(folder, random_pairs(1001))
    return folder


def seen_by_first_layer(task: Task, x: Array) -> Tensor:
    """What the first layer with weights takes, without the zeros that TensorFlow pads with."""
    assert isinstance(task.model, TorchModel)
    module = task.model.module().eval()
    first = next(part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear))
    taken: list[Tensor] = []
    first.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    with torch.inference_mode():
        module(torch.from_numpy(x))
    return taken[0][..., : x.shape[-2], : x.shape[-1]] if isinstance(first, nn.Conv2d) else taken[0].view(x.shape)


def pixels_of(name: str, data: Dataset, indices: I64) -> F32:
    """The pixels in [0, 1] that the files hold, channels first."""
    labels = data.labels[indices]
    if name == "digits":
        return np.asarray(data.samples[indices, None] / 16, np.float32)
    levels = greys(labels)[:, None] if name in GREY else colours(labels)
    return np.asarray(np.broadcast_to(levels[:, :, None, None] / 255, (*levels.shape, 32, 32)), np.float32)


@pytest.mark.parametrize(
    ("name", "model"),
    [*product(SOURCES, ("softmax", "mobilenet, imagenet")), *product(("digits", "pacs"), ("lenet", "wrn"))],
)
def test_a_first_layer_sees_pixels_on_the_scale_that_it_expects(
    name: str, model: str, folder: Path, tiny: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_small_cifar(monkeypatch)
    pixels = ["task.pixels=32"] if name in SIZED else []
    plan = tiny(f'task.data="{name}"', MODELS[model], *pixels)
    if name == "digits" and "mobilenet" in model:
        with pytest.raises(PlanError, match=r"a mobilenet takes images of .*32 × 32"):
            load_task(plan, folder)
        return
    task = load_task(plan, folder)
    for data in (task.source.train, task.source.test):
        indices = np.arange(len(data))[:20]
        seen = seen_by_first_layer(task, data.batch(indices).x)
        shown = pixels_of(name, data, indices)
        mean, deviation = (np.array(numbers)[:, None, None] for numbers in SCALES[name])
        expected = 2 * shown - 1 if "mobilenet" in model else (shown - mean) / deviation
        np.testing.assert_allclose(seen.numpy(), np.broadcast_to(expected, seen.shape), atol=1e-5)


def gradient() -> Image.Image:
    """Red grows to the right and green downwards, from 0 to 255; blue is 128."""
    ramp = np.linspace(0, 255, 32).round().astype(np.uint8)
    return Image.fromarray(np.stack([*np.meshgrid(ramp, ramp), np.full((32, 32), 128, np.uint8)], axis=2))


def expected_gradient() -> Tensor:
    """The same from -1 to 1."""
    ramp = torch.linspace(0, 255, 32).round() / 127.5 - 1
    blue = torch.full((32, 32), 128 / 127.5 - 1)
    return torch.stack([ramp.expand(32, 32), ramp[:, None].expand(32, 32), blue])


def gradient_in_pacs(folder: Path, form: str) -> None:
    """A folder like PACS, whose class 0 has gradients, and weights beside it."""
    write_collection(PACS, folder, form=form)
    for path in (folder / "pacs").glob(f"*/class 00/*.{form}"):
        gradient().save(path, quality=95)
    save_npz(folder, random_pairs(1001))


@pytest.mark.parametrize(("form", "levels"), [("png", 0.001), ("jpeg", 8)])
def test_a_gradient_reaches_the_first_convolution_of_a_mobilenet_from_minus_one_to_one(
    form: str, levels: float, tmp_path: Path, tiny: Callable[..., Plan]
) -> None:
    """JPEG may be off by a few of the 255 levels."""
    gradient_in_pacs(tmp_path, form)
    task = load_task(tiny('task.data="pacs"', "task.pixels=32", MODELS["mobilenet, imagenet"]), tmp_path)
    drawn = np.flatnonzero(task.source.train.labels == 0)
    seen = seen_by_first_layer(task, task.source.train.batch(drawn).x)
    assert (seen - expected_gradient()).abs().max() < levels / 127.5
    assert seen.min() < -0.9
    assert seen.max() > 0.9


def test_features_of_a_frozen_mobilenet_are_those_of_a_gradient_from_minus_one_to_one(
    tmp_path: Path, tiny: Callable[..., Plan]
) -> None:
    gradient_in_pacs(tmp_path, "png")
    task = load_task(tiny('task.data="pacs"', "task.pixels=32", 'task.model={name="mobilenet"}'), tmp_path)
    assert task.source.shape == (1280,)
    whole = build(MobileNet(), Inputs((3, 32, 32), 7, folder=tmp_path)).eval()
    assert isinstance(whole, nn.Sequential)
    behind_pixels = whole[1:-1]
    with torch.inference_mode():
        expected = behind_pixels(expected_gradient()[None])
        scaled_twice = behind_pixels((expected_gradient()[None] - 0.5) / 0.5)
    drawn = np.flatnonzero(task.source.train.labels == 0)
    features = torch.from_numpy(task.source.train.batch(drawn).x)
    assert (features - expected).norm(dim=1).max() < 1e-3 * expected.norm()
    assert (features - scaled_twice).norm(dim=1).min() > 0.3 * scaled_twice.norm()


ELEPHANTS = {101, 385, 386}
DOGS = set(range(151, 269))
"""Classes of ImageNet."""


REAL = ("mnist", "usps", "cifar10", "cifar100")


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_images_reach_a_mobilenet_from_minus_one_to_one(
    name: str, data_folder: Path, tiny: Callable[..., Plan]
) -> None:
    if not (data_folder / name).exists():
        pytest.skip(f"BAFFLE_DATA holds no {name}/")
    task = load_task(tiny(f'task.data="{name}"', MODELS["mobilenet, random"]), data_folder)
    seen = seen_by_first_layer(task, task.source.train.batch(np.arange(100)).x)
    assert seen.shape[1] == 3
    assert seen.min() == pytest.approx(-1, abs=1e-3)
    assert seen.max() == pytest.approx(1, abs=1e-3)
    assert task.source.pixel_scale == task.source.scale


def photos_of(data_folder: Path, folder: Path, each: int) -> None:
    """A folder laid out like PACS with that many real photos of dogs and of elephants, and a dot for all the rest."""
    write_collection(PACS, folder, side=1)
    for place in (folder / "pacs").glob("*/class *"):
        photographed = place.parent.name == "photo" and place.name in ("class 00", "class 01")
        for dot in list(place.iterdir())[0 if photographed else 1 :]:
            dot.unlink()
    archive = next((data_folder / "pacs").glob("*.zip"), None)
    if archive is None:
        pytest.skip("BAFFLE_DATA/pacs holds no zip")
    with zipfile.ZipFile(archive) as members:
        for label, kind in enumerate(("dog", "elephant")):
            names = sorted(name for name in members.namelist() if f"photo/{kind}/" in name and not name.endswith("/"))
            for name in names[:each]:
                (folder / "pacs" / "photo" / f"class {label:02}" / Path(name).name).write_bytes(members.read(name))


@pytest.mark.slow
def test_a_frozen_mobilenet_knows_dogs_and_elephants_on_photos_of_pacs(
    data_folder: Path, tmp_path: Path, tiny: Callable[..., Plan]
) -> None:
    """Of 80 photos it names 69 rightly, and 50 if their pixels are scaled twice."""
    for needed in ("pacs", "mobilenetv2"):
        if not (data_folder / needed).exists():
            pytest.skip(f"BAFFLE_DATA holds no {needed}/")
    photos_of(data_folder, tmp_path, each=50)
    (tmp_path / "mobilenetv2").symlink_to(data_folder / "mobilenetv2")
    task = load_task(tiny('task.data="pacs"', "task.pixels=128", 'task.model={name="mobilenet"}'), tmp_path)
    train = task.source.train
    photos = np.flatnonzero((train.domain_of == PACS.domains.index("photo")) & (train.labels < 2))
    weight, bias = read_weights(find_weights(tmp_path)).classifier

    def named_rightly(features: Tensor) -> int:
        found = (features @ weight.T + bias).argmax(1) - 1  # the published classifier has "background" as class 0
        right = (DOGS, ELEPHANTS)
        return sum(int(kind) in right[label] for kind, label in zip(found, train.labels[photos], strict=True))

    once = named_rightly(torch.from_numpy(train.batch(photos).x))
    believed = build(MobileNet(), Inputs((3, 128, 128), 7, scale=UNIT, folder=tmp_path)).eval()
    assert isinstance(believed, nn.Sequential)
    with torch.inference_mode():
        pixels = torch.from_numpy(pacs(tmp_path, 128).train.batch(photos).x)
        twice = named_rightly(believed[:-1](pixels))
    assert once > 0.75 * len(photos)
    assert twice < once - 0.1 * len(photos)
