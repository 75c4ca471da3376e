"""MobileNetV2: its size, layers and options, and weights from the files of both publishers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baffle.core.pixels import PixelScale
from baffle.errors import DataError, PlanError
from baffle.models.build import build
from baffle.models.inputs import UNIT, Inputs
from baffle.models.mobilenet import (
    BLOCKS,
    TENSORFLOW,
    TORCHVISION,
    Convention,
    Pair,
    Pixels,
    Same,
    find_weights,
    mobilenet,
    pretrained_mobilenet,
    read_weights,
)
from baffle.plan import MobileNet, parse
from baffle.runtime.torch.loss import weights_of
from baffle.runtime.torch.stages import pipeline_of
from tests.support.memory import at_most
from tests.support.mobilenet_weights import random_pairs, save_npz

SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Weights of the whole network, which no test changes."""
    return random_pairs(1001)


@pytest.fixture(scope="module")
def published(pairs: list[Pair], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with these weights in a file, which no test changes."""
    folder = tmp_path_factory.mktemp("published")
    save_npz(folder, pairs)
    return folder


def convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d)]


class TorchvisionLike(nn.Module):
    """The network as torchvision builds it, with the same names in its state dict and the same features."""

    def __init__(self) -> None:
        super().__init__()
        unit = self.unit
        features: list[nn.Module] = [unit(3, 32, 3, 2)]
        width = 32
        for expansion, channels, count, stride in BLOCKS:
            for number in range(count):
                wide = width * expansion
                parts: list[nn.Module] = [unit(width, wide, 1, 1)] if expansion > 1 else []
                parts += [unit(wide, wide, 3, 1 if number else stride, wide)]
                parts += [nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)]
                block = nn.Module()
                block.conv = nn.Sequential(*parts)
                block.adds = bool(number)  # type: ignore[assignment]
                features.append(block)
                width = channels
        self.features = nn.Sequential(*features, unit(width, 1280, 1, 1))
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(1280, 1000))

    @staticmethod
    def unit(before: int, after: int, size: int, stride: int, groups: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU6())

    def pooled_features(self, x: Tensor) -> Tensor:
        for part in self.features:
            if isinstance(part, nn.Sequential):
                x = part(x)
            else:
                y = part.conv(x)  # type: ignore[operator]
                x = x + y if part.adds else y
        return x.mean((2, 3))


def test_with_the_classifier_of_imagenet_it_has_3489097_weights() -> None:
    module = mobilenet((3, 224, 224), 1001)
    assert len(weights_of(module)) == 3_489_097
    assert len(convolutions(module)) == 52


@pytest.mark.parametrize(("activation", "norm"), [("relu6", "none"), ("hardswish", "group"), ("relu6", "batch")])
def test_every_option_runs_and_learns_from_every_weight(activation: str, norm: str) -> None:
    torch.manual_seed(0)
    model = MobileNet(weights="random", trained="all", activation=activation, norm=norm)  # type: ignore[arg-type]
    module = build(model, Inputs(SHAPE, 7))
    output = module(torch.rand(4, *SHAPE))
    assert output.shape == (4, 7)
    (output**2).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_random_weights_keep_a_signal_through_all_layers() -> None:
    torch.manual_seed(0)
    features = mobilenet(SHAPE, 7)[:-1](torch.rand(8, *SHAPE))
    assert 1e-2 < float(features.detach().std(0).mean()) < 10


@pytest.mark.parametrize("shape", [(3, 31, 64), (2, 32, 32), (64,), (3, 32)])
def test_samples_that_are_not_images_or_too_small_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"task\.model: a mobilenet takes images .* 32 × 32 .*got"):
        build(MobileNet(weights="random"), Inputs(shape, 7))


@pytest.mark.parametrize(("size", "convention"), [((33, 47), TENSORFLOW), ((64, 40), TORCHVISION)])
def test_any_size_runs_as_a_pipeline_of_stages(size: tuple[int, int], convention: Convention) -> None:
    torch.manual_seed(0)
    module = mobilenet((3, *size), 5, convention=convention).eval()
    pipeline = pipeline_of(module, torch.rand(2, 3, *size))
    assert pipeline is not None
    assert all(stage.separate for stage in pipeline.stages)
    assert pipeline.stages[-1].stop - pipeline.stages[-1].start == 5 * 1281


def test_pixels_reach_the_network_as_its_publisher_scaled_them() -> None:
    x = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(Pixels(TENSORFLOW.scale, UNIT)(x), x * 255 / 127.5 - 1)
    means, deviations = torch.tensor(TORCHVISION.scale.mean), torch.tensor(TORCHVISION.scale.deviation)
    expected = (x - means.view(1, 3, 1, 1)) / deviations.view(1, 3, 1, 1)
    assert torch.equal(Pixels(TORCHVISION.scale, UNIT)(x), expected)


@pytest.mark.parametrize("convention", [TENSORFLOW, TORCHVISION])
@pytest.mark.parametrize("scale", [PixelScale((0.1307,), (0.3081,)), PixelScale((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))])
def test_the_scale_of_a_data_set_is_undone_first_and_grey_becomes_three_channels(
    scale: PixelScale, convention: Convention
) -> None:
    x, pixels = torch.rand(2, 3, 4, 4), Pixels(convention.scale, scale)
    mean, deviation = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (scale.mean, scale.deviation))
    torch.testing.assert_close(pixels((x - mean) / deviation), Pixels(convention.scale, UNIT)(x))
    torch.testing.assert_close(pixels(x[:, :1]), pixels(x[:, :1].repeat(1, 3, 1, 1)))


def test_values_on_the_networks_own_scale_keep_every_bit() -> None:
    x = torch.rand(2, 3, 4, 4) * 2 - 1
    assert torch.equal(Pixels(TENSORFLOW.scale, PixelScale((0.5,), (0.5,)))(x), x)


def test_weights_of_imagenet_refuse_pixels_of_an_unknown_scale(published: Path) -> None:
    with pytest.raises(PlanError, match=r"task\.model: ImageNet.* PixelScale\(mean, deviation\)"):
        build(MobileNet(), Inputs(SHAPE, 7, scale=None, folder=published))
    build(MobileNet(weights="random"), Inputs(SHAPE, 7, scale=None))


@pytest.mark.parametrize("size", [(8, 8), (7, 8), (8, 7), (5, 5)])
def test_padding_is_tensorflows(size: tuple[int, int]) -> None:
    """Output i starts at input 2i − ⌊p/2⌋, where p = 2(⌈n/2⌉ − 1) + 3 − n is the number of zeros added to n inputs."""
    x, filters = torch.rand(1, 1, *size), torch.rand(1, 1, 3, 3)
    output = F.conv2d(Same()(x), filters, stride=2)
    before = [(2 * (-(-n // 2) - 1) + 3 - n) // 2 for n in size]
    padded = F.pad(x, (before[1], 3, before[0], 3))
    rows, columns = (-(-n // 2) for n in size)
    assert output.shape[2:] == (rows, columns)
    for i in range(rows):
        for j in range(columns):
            tile = padded[0, 0, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
            assert float(output[0, 0, i, j]) == pytest.approx(float((tile * filters[0, 0]).sum()), rel=1e-5)


def test_a_file_of_folded_pairs_fills_every_convolution(pairs: list[Pair], published: Path) -> None:
    module = pretrained_mobilenet(SHAPE, 7, published)
    for part, (weight, bias) in zip(convolutions(module), pairs, strict=False):
        assert torch.equal(part.weight, weight)
        assert part.bias is not None
        assert torch.equal(part.bias, bias)
    assert torch.equal(read_weights(find_weights(published)).classifier[0], pairs[-1][0])
    assert isinstance(module[1], Same)
    assert not module(torch.rand(2, *SHAPE)).any()


def test_a_state_dict_of_torchvision_gives_the_same_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = TorchvisionLike()
    for part in theirs.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.3)
            part.running_mean = torch.randn(part.num_features) * 0.1
            part.running_var = torch.rand(part.num_features) + 0.2
    torch.save(theirs.state_dict(), tmp_path / "mobilenet_v2-b0353104.pth")
    ours, theirs = pretrained_mobilenet((3, 45, 64), 7, tmp_path).eval(), theirs.eval()
    x = torch.rand(3, 3, 45, 64)
    with torch.inference_mode():
        torch.testing.assert_close(
            ours[:-1](x), theirs.pooled_features(Pixels(TORCHVISION.scale, UNIT)(x)), rtol=1e-3, atol=1e-4
        )


def test_a_new_head_behind_a_frozen_front_is_all_that_is_trained(published: Path) -> None:
    head = build(MobileNet(), Inputs(SHAPE, 7, folder=published))
    assert len(weights_of(head)) == 7 * 1281
    whole = build(MobileNet(trained="all"), Inputs(SHAPE, 7, folder=published))
    assert len(weights_of(whole)) == 3_489_097 - 994 * 1281


def test_weights_of_imagenet_have_their_own_activation_and_norm() -> None:
    for setting in ('activation = "relu"', 'norm = "group"'):
        with pytest.raises(PlanError, match=r'task\.model: .*"relu6".*"none".*weights = "random"'):
            parse(f'[task.model]\nname = "mobilenet"\n{setting}')
        parse(f'[task.model]\nname = "mobilenet"\nweights = "random"\n{setting}')


@pytest.mark.parametrize("folder", [None, "empty"])
def test_a_message_about_missing_weights_says_what_to_download(folder: str | None, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mobilenet_v2-\*\.pth.*folder mobilenetv2.*BAFFLE_DATA.*random"):
        pretrained_mobilenet(SHAPE, 7, tmp_path if folder else None)


NPZ, PTH = "folded.npz", "mobilenet_v2-b0353104.pth"


@pytest.mark.parametrize(
    ("name", "content"),
    [(NPZ, "nothing"), (NPZ, "noise"), (NPZ, "half"), (NPZ, "a flipped bit"), (PTH, "nothing"), (PTH, "half")],
)
def test_a_damaged_file_is_named(name: str, content: str, published: Path, tmp_path: Path) -> None:
    whole = find_weights(published).read_bytes()
    middle = len(whole) // 2
    bytes_of = {"nothing": b"", "noise": np.random.default_rng(0).bytes(5000), "half": whole[:middle]}
    bytes_of["a flipped bit"] = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    (tmp_path / "mobilenetv2").mkdir()
    (tmp_path / "mobilenetv2" / name).write_bytes(bytes_of[content])
    with pytest.raises(DataError, match=rf"{name} is damaged or cannot be read .*; download it again"):
        pretrained_mobilenet(SHAPE, 7, tmp_path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda pairs: pairs[:-1], "not a MobileNetV2 of width one.*got 51 convolutions"),
        (lambda pairs: [*pairs[1:], pairs[0]], "not a MobileNetV2 of width one"),
        (lambda pairs: [(pairs[0][0] * np.nan, pairs[0][1]), *pairs[1:]], "not finite numbers"),
        (lambda pairs: [(pairs[0][0], pairs[0][1][:-1]), *pairs[1:]], "not a MobileNetV2 of width one"),
    ],
    ids=["fewer", "another order", "nan", "short bias"],
)
def test_another_networks_weights_are_refused(
    spoil: Callable[[Any], Any], reason: str, pairs: list[Pair], tmp_path: Path
) -> None:
    save_npz(tmp_path, spoil(pairs))
    with pytest.raises(DataError, match=reason):
        pretrained_mobilenet(SHAPE, 7, tmp_path)


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    path = save_npz(tmp_path, random_pairs(1001, seed=0))
    first = read_weights(path)
    assert read_weights(path) is first
    save_npz(tmp_path, random_pairs(1001, seed=1))
    assert not torch.equal(read_weights(path).classifier[0], first.classifier[0])


def test_the_published_file_holds_the_published_number_of_weights(data_folder: Path) -> None:
    if not (data_folder / "mobilenetv2").exists():
        pytest.skip("needs MobileNetV2's weights in BAFFLE_DATA/mobilenetv2")
    pretrained = read_weights(find_weights(data_folder))
    pairs = (*pretrained.convolutions, pretrained.classifier)
    assert sum(part.numel() for pair in pairs for part in pair) == 3_489_097


def _packed_zeros(path: Path, size: int) -> Path:
    """An npz file whose first layer unpacks to this many zeros."""
    with ZipFile(path, "w", ZIP_DEFLATED) as archive, archive.open("00_layer.weight.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (size,)})
        for _ in range(size >> 24):
            file.write(bytes(1 << 24))
    return path


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    folder = tmp_path / "mobilenetv2"
    folder.mkdir()
    path = _packed_zeros(folder / "folded.npz", 5 << 24)
    with at_most(8 << 20), pytest.raises(DataError, match=r"folded\.npz is damaged .*would unpack to 83,886,"):
        pretrained_mobilenet(SHAPE, 7, tmp_path)
    path.rename(folder / "mobilenet_v2-b0353104.pth")
    with at_most(8 << 20), pytest.raises(DataError, match=r"b0353104\.pth is damaged .*would unpack to 83,886,"):
        pretrained_mobilenet(SHAPE, 7, tmp_path)
    (folder / "mobilenet_v2-b0353104.pth").write_bytes(b"")
    os.truncate(folder / "mobilenet_v2-b0353104.pth", 1 << 40)
    with at_most(8 << 20), pytest.raises(DataError, match="it has 1,099,511,627,776 bytes, expected at most"):
        pretrained_mobilenet(SHAPE, 7, tmp_path)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"a.weight": np.zeros((2, 2), np.float32)},
        {"a.weight": np.array("text"), "a.bias": np.array("text")},
        {"a.weight": np.float32(1), "a.bias": np.float32(1)},
        {"a.weight": np.zeros(2, np.complex64), "a.bias": np.zeros(2, np.float32)},
    ],
    ids=["nothing", "no bias", "text", "no dimension", "other numbers"],
)
def test_layers_of_another_kind_are_refused(arrays: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mobilenetv2").mkdir()
    np.savez(tmp_path / "mobilenetv2" / "folded.npz", **arrays)
    with pytest.raises(DataError, match=r"folded\.npz is (damaged|not a MobileNetV2)"):
        pretrained_mobilenet(SHAPE, 7, tmp_path)


@pytest.mark.parametrize("state", [[], {"a.weight": 1}, {1: torch.zeros(2)}, {"features": print}])
def test_a_state_of_another_kind_and_code_are_refused(state: object, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "mobilenet_v2-b0353104.pth")
    with pytest.raises(DataError, match=r"b0353104\.pth is damaged or cannot be read"):
        pretrained_mobilenet(SHAPE, 7, tmp_path)
