"""Frozen backbones: features are computed once, with the same bits in whatever order they are asked for."""

import copy
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from baffle.core.arrays import F32, I64
from baffle.data.sources import Dataset, Source, load as load_data
from baffle.errors import DataError
from baffle.journal.audit import verify
from baffle.plan import change, load
from baffle.runtime.torch.model import TorchFront, halves
from baffle.simulation import simulate
from baffle.task.features import PIECE, Backbones, Features
from baffle.task.load import load_task

SHAPE = (1, 8, 8)


def backbone() -> nn.Sequential:
    front = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    return front.requires_grad_(False)


def frozen() -> nn.Module:
    """A frozen front and a trained head, as a factory for plans."""
    return nn.Sequential(backbone(), nn.Linear(96, 10))


def samples(count: int) -> F32:
    return np.random.default_rng(0).normal(size=(count, *SHAPE)).astype(np.float32)


def data_of(count: int) -> Dataset:
    return Dataset(samples(count), np.zeros(count, np.int64), np.asarray)


def test_a_model_is_split_into_front_and_head() -> None:
    module = frozen()
    parts = halves(module, samples(2))
    assert parts is not None
    front, head = parts
    x = torch.from_numpy(samples(5))
    with torch.no_grad():
        assert torch.equal(head(front(x)), module(x))
    assert not any(parameter.requires_grad for parameter in front.parameters())
    assert [p.shape for p in head.parameters()] == [(10, 96), (10,)]


def _batch_statistics() -> nn.Module:
    front = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten())
    return nn.Sequential(front.requires_grad_(False), nn.Linear(72, 3))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        nn.Sequential(nn.Conv2d(1, 1, 1), backbone(), nn.Linear(96, 10)),
        _batch_statistics(),
    ],
    ids=["all is trained", "the front is trained", "a feature depends on the batch"],
)
def test_nothing_is_kept_where_it_would_be_wrong_or_useless(module: nn.Module) -> None:
    assert halves(module, samples(2)) is None


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 300), st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=40), min_size=1, max_size=6))
def test_features_have_the_same_bits_in_whatever_order_they_are_asked_for(count: int, asked: list[list[int]]) -> None:
    front = backbone()

    def forward(x: F32) -> F32:
        with torch.no_grad():
            features: F32 = front(torch.from_numpy(x)).numpy()
        return features

    data = data_of(count)
    whole = Features(data, forward, 2**30).rows(np.arange(count))
    in_memory, on_disk = Features(data, forward, 2**30), Features(data, forward, 0)
    for numbers in asked:
        indices: I64 = np.array(numbers) % count
        assert in_memory.rows(indices).tobytes() == whole[indices].tobytes() == on_disk.rows(indices).tobytes()


def test_a_sample_runs_through_the_front_once() -> None:
    seen: list[int] = []

    def forward(x: F32) -> F32:
        seen.append(len(x))
        return x.reshape(len(x), -1)

    features = Features(data_of(3 * PIECE + 5), forward, 2**30)
    for _ in range(3):
        features.rows(np.arange(3 * PIECE + 5))
    assert sum(seen) == 3 * PIECE + 5


def test_a_file_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(DataError, match=r"run\.features_mb"):
        Features(data_of(10), lambda x: x.reshape(len(x), -1), 0)


def _factory() -> str:
    return f'task.model={{name="custom", factory="{__name__}:frozen"}}'


def test_tasks_with_the_same_data_and_front_share_features_and_others_do_not() -> None:
    torch.manual_seed(0)
    first, other = backbone(), backbone()
    computed: list[nn.Module] = []

    def compute(data: str, front: nn.Module) -> None:
        def features() -> Source:
            computed.append(front)
            return load_data("digits")

        shared.source((data, TorchFront(front, "cpu").key), features)

    shared = Backbones()
    fronts = (first, first, first, other, copy.deepcopy(other), first)
    for data, front in zip("aabbba", fronts, strict=True):
        compute(data, front)
    assert computed == [first, first, other, first]


def test_shared_features_change_no_bit_of_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plans = [load("digits", ["rounds=2", f"probe.k={k}", "run.evaluate_every=2", _factory()]) for k in (2, 3)]
    shared = Backbones()
    together = [simulate(plan, tmp_path / f"{i}", backbones=shared) for i, plan in enumerate(plans)]
    alone = [simulate(plan, tmp_path / f"{i}-alone") for i, plan in enumerate(plans)]
    assert [run["weights_sha256"] for run in together] == [run["weights_sha256"] for run in alone]
    on_disk = simulate(change(plans[0], ["run.features_mb=0"]), tmp_path / "disk")
    assert on_disk["weights_sha256"] == together[0]["weights_sha256"] == verify(tmp_path / "disk").weights_sha256
    assert on_disk["n_weights"] == 970  # the head alone
    assert load_task(plans[0], None, shared).source is load_task(plans[1], None, shared).source
