"""Clients that can backpropagate get the same scalars by one backward pass, in the same rounds as those that probe."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baffle.core.arrays import F32, F64
from baffle.core.directions import Directions, Support, distribution_names, distribution_of
from baffle.core.probe import scalars_of
from baffle.errors import PlanError
from baffle.federation import workers_of
from baffle.journal.audit import verify
from baffle.measuring.costs import costs
from baffle.measuring.duration import measure_duration
from baffle.network.member.equipment import with_plan
from baffle.network.member.member import Member
from baffle.network.member.policy import Policy
from baffle.network.settling import require_clients_of_their_own
from baffle.plan import Derivatives, Plan, change, load
from baffle.simulation import baseline_of, simulate
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of
from tests.support.lines_in_memory import Federation, LinesInMemory, new_keys

MakePlan = Callable[..., Plan]
GRADIENT = "run.derivatives=gradient"
LENET = 'task.model={name="lenet", channels=[2, 3], head="flatten"}'

WAYS: dict[str, tuple[str, ...]] = {
    "gaussian": (),
    "on the sphere": ("probe.distribution=sphere",),
    "central": ("probe.scheme=central",),
    "an exact head": ("probe.head=exact",),
    "layers": ("probe.supports=layers",),
    "outer": ("probe.distribution=outer",),
}
SMOOTH = 'task.model={name="custom", factory="tests.simulation.test_derivatives:smooth"}'


def smooth() -> object:
    """A net whose curvature is small, with dropout, which is off in probes."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 10))


def _plan(*settings: str) -> Plan:
    small = ("rounds=3", LENET, "federation.clients=4", "federation.batch=8", "probe.k=12", "secure.floor=2")
    return load("digits", (*small, "run.runtime=torch", *settings))


@pytest.mark.parametrize("way", WAYS)
def test_scalars_by_a_backward_pass_are_those_of_probes_within_the_window(way: str) -> None:
    """They differ by rounding and curvature alone, and in float64 both are small."""
    plan = _plan(SMOOTH, *WAYS[way], "probe.sigma=1e-5")
    task = load_task(plan)
    weights = task.initial_weights()
    trajectory = trajectory_of(task.plan, len(weights))
    found = dict[str, F64]()
    for derivatives in ("probes", "gradient"):
        worker = workers_of(task, trajectory, lambda: nullcontext(task.model.runtime(task.plan.probe, "float64")))[1]
        vector = replace(worker, derivatives=derivatives).vector(0, weights)
        total = trajectory.ring.decode(vector, 1)
        found[derivatives] = np.concatenate(trajectory.means(total.totals, total.weight))
    size = float(np.sqrt(np.mean(found["probes"][:12] ** 2)))
    assert size > 0.1
    np.testing.assert_allclose(found["gradient"], found["probes"], atol=3e-3 * size)


@pytest.mark.parametrize("block", [7, 1 << 17])
@pytest.mark.parametrize("name", distribution_names())
def test_a_scalar_is_the_dot_product_with_its_direction(name: str, block: int) -> None:
    gradient: F32 = np.random.default_rng(0).normal(size=30).astype(np.float32)
    directions = Directions(bytes(32), distribution_of(name, ((10, 2), (10,))))
    touched = [Support(0, 30), Support(0, 20), Support(20, 30), Support(0, 30)]
    unit = directions.distribution.unit
    for k, support in enumerate(touched):
        z = directions.over(support, [k])[0] * unit
        own = np.concatenate([gradient[weights] for weights, _ in support.parts()]).astype(np.float64)
        expected = float(z @ own) * directions.stretch([k], support.size)[0] ** 2
        assert scalars_of(gradient, directions, touched, block)[k] == pytest.approx(expected, rel=1e-12)


def test_a_run_says_how_its_passes_were_made_and_its_digest_does_not(tmp_path: Path) -> None:
    plan = _plan("probe.head=exact")
    fast = change(plan, [GRADIENT])
    assert fast.trajectory_digest() == plan.trajectory_digest()
    probed, differentiated = simulate(plan, tmp_path / "probed"), simulate(fast, tmp_path / "fast")
    assert (probed["derivatives"], probed["forwards"]) == ("probes", 3 * 4 * 13)
    assert (differentiated["derivatives"], differentiated["forwards"]) == ("gradient", 3 * 4)
    assert differentiated["uplink_bytes_per_client_round"] == probed["uplink_bytes_per_client_round"]
    assert verify(tmp_path / "fast").weights_sha256 == differentiated["weights_sha256"]
    assert baseline_of(fast).run.derivatives == "probes"


@pytest.mark.parametrize(
    "way",
    [
        ("federation.seeds=own",),
        ("federation.level=epoch", "federation.steps=2"),
        ("probe.supports=units", "probe.k=40"),
        ("federation.local_steps=3", "federation.warm_up=1", "probe.head=exact"),
        ("federation.tiers=[{k=4, share=0.5}]",),
        ("federation.weighting=uniform", "privacy.clip=2", "privacy.noise=0.1"),
        ('task.model={name="softmax"}', "probe.head=exact"),
    ],
)
def test_every_kind_of_run_may_be_made_of_backward_passes(way: tuple[str, ...], tmp_path: Path) -> None:
    summary = simulate(_plan(*way, GRADIENT), tmp_path / "run")
    assert summary["skipped_rounds"] == 0
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


def test_costs_and_time_do_not_count_directions() -> None:
    task = load_task(_plan(GRADIENT))
    assert costs(task).forwards == 1
    assert measure_duration(task).total > 0


def test_a_fleet_of_both_kinds_is_summed_in_the_same_rounds(tiny: MakePlan, tmp_path: Path) -> None:
    """The sum does not tell them apart. Each client's own log says how it computed."""
    plan = tiny('task.init="numpy"', LENET, "federation.clients=4", "secure.mode=on", "secure.floor=2", "rounds=3")
    federation = Federation(new_keys(tmp_path, 4), tmp_path, plan)
    logs = [list[str]() for _ in range(4)]
    lines = LinesInMemory()
    ways: tuple[Derivatives, ...] = ("probes", "gradient", "gradient", "probes")
    for number, derivatives in enumerate(ways):
        equip = with_plan(number, None, part=True, derivatives=derivatives)
        member = Member(
            federation.keys[number], tmp_path / f"{number}", equip, policy=Policy(floor=2), tell=logs[number].append
        )
        lines.clients[number] = member.answer
    summary = federation.serve(lines)
    assert (summary["skipped_rounds"], summary["refusals"]) == (0, 0)
    for number, words in ((0, f"made {3 * (plan.probe.k + 1)} forward passes"), (1, "made 3 backward passes")):
        assert any(words in line for line in logs[number]), logs[number]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("estimator=backprop",), "takes a backward pass in place of probes, .* with this estimator"),
        (("probe.stacked=true",), "with this probe.stacked"),
        (("probe.memory_mb=100",), "with this probe.memory_mb"),
        (("run.runtime=onnx", 'task.init="numpy"'), "only PyTorch can follow run.derivatives"),
        (("task.loss=tests.support.own_tasks:in_numpy",), 'run.derivatives = "gradient" needs'),
    ],
)
def test_what_does_not_go_with_a_backward_pass_is_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        load_task(_plan(*settings, GRADIENT))


def test_the_server_of_a_network_does_not_choose() -> None:
    with pytest.raises(PlanError, match="each client of a network decides for itself"):
        require_clients_of_their_own(_plan(GRADIENT))
