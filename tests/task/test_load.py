"""Tasks loaded from plans: data, shares, tiers, models, and settings that a plan leaves open."""

import threading
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from baffle.data.sources import Dataset, Source
from baffle.errors import PlanError, UnusableDataError
from baffle.plan import Plan, load
from baffle.runtime.torch.loss import TorchLoss
from baffle.task.load import Runtimes, Task, load_server_task, load_task, versions

MakePlan = Callable[..., Plan]


@pytest.mark.parametrize("device", ["abacus", "cuda:99", ""])
def test_a_missing_device_is_refused(tiny: MakePlan, device: str) -> None:
    with pytest.raises(PlanError, match=r"run\.device"):
        load_task(tiny(f'run.device="{device}"'))


def _fingerprint(task: Task) -> tuple[bytes, bytes]:
    return task.initial_weights().tobytes(), np.concatenate(task.shares).tobytes()


@pytest.mark.parametrize(
    "setting", ["probe.k=64", "probe.sigma=0.1", 'estimator="backprop"', "update.rate=0.5", 'federation.level="epoch"']
)
def test_plans_of_one_seed_start_from_the_same_weights_on_the_same_clients(tiny: MakePlan, setting: str) -> None:
    assert _fingerprint(load_task(tiny(setting))) == (first := _fingerprint(load_task(tiny())))
    weights, shares = _fingerprint(load_task(tiny(setting, "seed=1")))
    assert first[0] != weights
    assert first[1] != shares


def test_initial_weights_leave_the_callers_random_numbers_alone(tiny: MakePlan) -> None:
    task = load_task(tiny())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = task.initial_weights()
    torch.testing.assert_close(torch.rand(3), expected)
    assert task.initial_weights().tobytes() == first.tobytes()


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ("", {8: 10}),
        ("{k=2, share=0.5}", {8: 5, 2: 5}),
        ("{k=2, share=0.5}, {k=4, share=0.2}", {8: 3, 2: 5, 4: 2}),
        ("{k=2, share=1.0}", {2: 10}),
        ("{k=2, share=0.01}", {8: 10}),
    ],
)
def test_tiers_hold_their_shares_of_the_clients(tiny: MakePlan, tiers: str, expected: dict[int, int]) -> None:
    settings = ("federation.clients=10", "probe.k=8", f"federation.tiers=[{tiers}]")
    found = load_task(tiny(*settings)).tiers
    assert Counter(found) == expected
    assert load_task(tiny(*settings)).tiers == found
    assert len(expected) == 1 or any(load_task(tiny(*settings, f"seed={seed}")).tiers != found for seed in (1, 2))


def test_a_runtime_is_lent_to_one_borrower_at_a_time(tiny: MakePlan) -> None:
    runtimes, lent = Runtimes(load_task(tiny()), 2), list[object]()

    def borrow_one() -> None:
        with runtimes.borrow() as runtime:
            lent.append(runtime)

    third = threading.Thread(target=borrow_one)
    with runtimes.borrow() as first, runtimes.borrow() as second:
        assert first is not second
        third.start()
        assert not lent
    third.join(30)
    assert lent == [first] or lent == [second]
    for _ in range(3):  # each comes back from a borrower that fails
        with pytest.raises(ZeroDivisionError), runtimes.borrow():
            raise ZeroDivisionError


def test_versions_say_what_a_run_was_computed_with(tiny: MakePlan) -> None:
    installed = versions(load_task(tiny()).model)
    assert installed["torch"] == torch.__version__
    assert installed["numpy"] == np.__version__
    assert {"baffle", "python", "machine"} <= installed.keys()


OWN = """
import numpy as np
from baffle import Dataset, Source

def source():
    x = np.random.default_rng(0).normal(size=(80, 1, 8, 8)).astype(np.float32)
    y, domain_of = np.arange(80) % 10, np.arange(80) // 40
    data = Dataset(x, y, lambda x: x, lambda x, key: x + np.float32(key[0]), domain_of=domain_of, writer_of=y)
    return Source(data, data, 10, ("left", "right"))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_grouped_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return 'task.data="own_grouped_data:source"'


def test_shares_follow_the_plans_partition(tiny: MakePlan, own: str) -> None:
    by_domain = load_task(tiny(own, "federation.partition=domain", "federation.clients=4"))
    assert [set((share // 40).tolist()) for share in by_domain.shares] == [{0}, {0}, {1}, {1}]
    by_writer = load_task(tiny(own, "federation.partition=writer", "federation.clients=5"))
    assert [len(set((share % 10).tolist())) for share in by_writer.shares] == [1] * 5
    dirichlet = load_task(tiny(own, "federation.partition=dirichlet", "federation.floor_samples=20"))
    assert min(len(share) for share in dirichlet.shares) >= 20
    assert dirichlet.plan.ring.n_max == max(len(share) for share in dirichlet.shares)


def test_a_partition_that_the_data_cannot_have_is_refused(tiny: MakePlan, own: str) -> None:
    with pytest.raises(PlanError, match=r"federation\.clients: 3 clients cannot be divided among 2 domains"):
        load_task(tiny(own, "federation.partition=domain"))
    with pytest.raises(PlanError, match=r"federation\.partition: digits has no writers"):
        load_task(tiny("federation.partition=writer"))


def test_data_that_cannot_be_augmented_or_sized_is_refused(tiny: MakePlan, own: str) -> None:
    assert load_task(tiny(own, "task.augment=true")).plan.task.augment
    with pytest.raises(PlanError, match=r"task\.augment: digits has no augmentation"):
        load_task(tiny("task.augment=true"))
    with pytest.raises(PlanError, match=r"task\.pixels: only pacs and officehome"):
        load_task(tiny("task.pixels=16"))


def test_probes_are_computed_in_the_precision_of_the_plan_and_backpropagation_in_float32(
    tiny: MakePlan,
) -> None:
    task = load_task(tiny("probe.precision=bfloat16"))
    for precision, dtype in (("", torch.bfloat16), ("float32", torch.float32)):
        runtime = task.runtime(precision)
        assert isinstance(runtime, TorchLoss)
        assert {p.dtype for p in runtime._module.parameters()} == {dtype}
    assert task.initial_weights().dtype == np.float32
    assert load_task(tiny("probe.precision=bfloat16", "estimator=backprop")).precision == "float32"


class FullPrecisionOnly(torch.nn.Linear):
    """A model with an operator that only float32 supports, as on some machines."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")
        return super().forward(x.flatten(1))


def full_precision_only() -> torch.nn.Module:
    return FullPrecisionOnly(64, 10)


def test_a_machine_that_cannot_compute_in_a_precision_says_so(tiny: MakePlan) -> None:
    model = f"task.model={{name='custom', factory='{__name__}:full_precision_only'}}"
    load_task(tiny(model))
    with pytest.raises(PlanError, match=r"probe\.precision: this machine cannot.*float16.*float32.*not implemented"):
        load_task(tiny(model, "probe.precision=float16"))


def test_a_client_without_samples_is_refused_by_its_number(tiny: MakePlan) -> None:
    none = np.arange(0)
    with pytest.raises(UnusableDataError, match=r"^client 1 of 3 has no samples; leave it out, or give it some$"):
        load_task(tiny(), share=lambda _plan, _source: [np.arange(5), none, np.arange(5)])
    with pytest.raises(UnusableDataError, match=r"^client 0 and 1 more of 3 has no samples"):
        load_task(tiny(), share=lambda _plan, _source: [none, np.arange(5), none])


@pytest.mark.parametrize("shape", [(5,), (3, 8, 8)])
def test_a_server_reads_no_training_sample_of_a_source_that_states_its_shape_alone(shape: tuple[int, ...]) -> None:
    def unread() -> Dataset:
        raise AssertionError("the training set was read")

    test = Dataset(np.zeros((4, *shape), np.float32), np.zeros(4, np.int64))
    source = Source(unread, test, classes=3, shape=shape)
    task = load_server_task(load("digits", {"task.model": {"name": "softmax"}}), None, 10, source)
    assert len(task.initial_weights()) == 3 * (prod(shape) + 1)


def test_a_plan_with_a_validation_split_is_tested_on_training_samples_that_no_client_has(tiny: MakePlan) -> None:
    whole, split = load_task(tiny()), load_task(tiny("task.validation=true"))
    held = {sample.tobytes() for sample in split.source.test.samples}
    trained = {split.source.train.samples[index].tobytes() for share in split.shares for index in share}
    assert held <= {sample.tobytes() for sample in whole.source.train.samples}
    assert not held & trained
    assert not held & {sample.tobytes() for sample in whole.source.test.samples}
    assert whole.plan.digest() != split.plan.digest()
