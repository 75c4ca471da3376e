"""Whole runs with [privacy]: the same bits with and without the secure sum, resumed, verified, and ε counted."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from baffle.core.arrays import I64
from baffle.core.messages import Outcome, decode
from baffle.errors import PlanError
from baffle.journal.audit import verify
from baffle.journal.store import Journal
from baffle.plan import Plan, change, load
from baffle.privacy.skellam import Randomness
from baffle.simulation import drops, resume, simulate
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of
from tests.support.watched_runs import interrupt_after, records_of

MakePlan = Callable[..., Plan]

PRIVATE = ("federation.weighting=uniform", "privacy.noise=0.5", "privacy.clip=1.0")

TIERS = "federation.tiers=[{k=2, share=0.2}]"
VARIANTS: dict[str, tuple[str, ...]] = {
    "scalars": ("federation.clients=10", "federation.participation=0.5"),
    "groups": ("federation.clients=9", "secure.groups=3", "secure.group_seeds=own", "secure.combine=median"),
    "dropout": ("federation.clients=18", "federation.dropout=0.1", "secure.groups=2", TIERS),
    "gradients": ('estimator="backprop"',),
    "outer": ("probe.distribution=outer",),
    "stacked": ("probe.stacked=true",),
}


@pytest.fixture
def plan(tiny: MakePlan) -> MakePlan:
    """The tiny plan with five clients and noise, changed by further settings."""
    return lambda *settings: tiny("federation.clients=5", 'secure.mode="on"', *PRIVATE, *settings)


def fixed(number: int) -> Randomness:
    """The same bytes for the same client in every run."""
    return np.random.default_rng(number).bytes


@pytest.mark.parametrize("name", VARIANTS)
def test_with_the_same_noise_a_run_ends_alike_with_and_without_the_secure_sum(
    plan: MakePlan, tmp_path: Path, name: str
) -> None:
    settled = load_task(plan("rounds=3", *VARIANTS[name])).plan
    on, off = (
        simulate(change(settled, [f"secure.mode={mode}"]), tmp_path / mode, randomness=fixed) for mode in ("on", "off")
    )
    for key in ("weights_sha256", "trajectory_digest", "test_accuracy", "dropouts", "skipped_rounds", "epsilon"):
        assert on[key] == off[key], key
    assert on["skipped_rounds"] == 0
    assert (on["dropouts"] > 0) == name.startswith("dropout")
    assert verify(tmp_path / "on").chain == verify(tmp_path / "off").chain


@pytest.mark.parametrize("name", ["scalars", "stacked", "gradients"])
def test_other_noise_leads_elsewhere_and_it_comes_from_the_system(plan: MakePlan, tmp_path: Path, name: str) -> None:
    settled = load_task(plan("rounds=1", *VARIANTS[name])).plan  # the size of stacked micro-batches is measured
    one = simulate(settled, tmp_path / "one", randomness=fixed)
    others = [simulate(settled, tmp_path / folder) for folder in ("two", "three")]
    assert len({summary["trajectory_digest"] for summary in (one, *others)}) == 1
    assert len({summary["weights_sha256"] for summary in (one, *others)}) == 3


@pytest.mark.parametrize("mode", ["on", "off"])
def test_with_fewer_survivors_than_the_noise_counts_on_a_round_is_skipped(
    plan: MakePlan, tmp_path: Path, mode: str
) -> None:
    settings = ("federation.dropout=0.35", "rounds=6", "secure.floor=4", f"secure.mode={mode}")
    summary = simulate(plan(*settings), tmp_path / "run", randomness=fixed)
    contributors = [record["contributors"] for record in records_of(tmp_path / "run")]
    assert 0 < contributors.count(0) == summary["skipped_rounds"] < 6
    assert not {1, 2, 3} & set(contributors)


def test_a_target_gives_the_noise_and_every_round_says_what_is_spent(plan: MakePlan, tmp_path: Path) -> None:
    settings = ("privacy.noise=0", "privacy.epsilon=12", "privacy.delta=1e-6", "federation.dropout=0.1")
    summary = simulate(plan(*settings), tmp_path / "run")
    resolved = load(str(tmp_path / "run" / "plan.toml"))
    assert resolved.privacy.noise > 0.5
    assert resolved.privacy.sharers == 3
    assert 11.9 < summary["epsilon"] <= 12
    assert (summary["delta"], summary["noise"]) == (1e-6, resolved.privacy.noise)
    assert summary["train_loss"] is None
    records = records_of(tmp_path / "run")
    spent = [record["epsilon"] for record in records]
    assert spent == sorted(set(spent))  # also in rounds that were skipped
    assert spent[-1] == summary["epsilon"]
    assert {record["loss"] for record in records} == {None}
    assert {record["clipped"] for record in records} == {0}
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_a_run_with_noise_resumes_and_verifies(plan: MakePlan, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        simulate(plan(), tmp_path / "run", watch=interrupt_after(3))
    begun = verify(tmp_path / "run")
    assert begun.rounds == 3
    whole = resume(tmp_path / "run")
    assert verify(tmp_path / "run").weights_sha256 == whole["weights_sha256"]
    assert len({record["epsilon"] for record in records_of(tmp_path / "run")}) == whole["rounds"]


def test_a_run_goes_on_beyond_its_target_only_with_a_larger_one(plan: MakePlan, tmp_path: Path) -> None:
    simulate(plan("privacy.noise=0", "privacy.epsilon=12"), tmp_path / "run")
    with pytest.raises(PlanError, match=r"privacy.epsilon: 12 rounds with noise .* more than 12"):
        resume(tmp_path / "run", ["rounds=12"])
    longer = resume(tmp_path / "run", ["rounds=12", "privacy.epsilon=20"])
    assert 12 < longer["epsilon"] < 20
    assert verify(tmp_path / "run").rounds == 12


def test_a_run_does_not_go_on_with_other_noise(plan: MakePlan, tmp_path: Path) -> None:
    simulate(plan("rounds=1"), tmp_path / "run")
    for setting in ("privacy.noise=0.6", "privacy.clip=2.0", "privacy.sharers=2", "secure.floor=2"):
        with pytest.raises(PlanError, match=r"a resumed run may change|privacy.sharers: expected at most 2"):
            resume(tmp_path / "run", ["rounds=3", setting])


def test_a_loss_that_is_not_finite_leaves_no_trace_but_noise(plan: MakePlan, tmp_path: Path) -> None:
    """Steps so large that every loss is infinite: nobody abstains, no weight changes, no sum is missing."""
    wild = ("update.rate=1e30", 'update.optimizer="sgd"', "update.ema=0", "rounds=4")
    summary = simulate(plan(*wild), tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert [record["contributors"] for record in records] == [5] * 4
    assert (summary["refusals"], summary["skipped_rounds"], summary["clipped"]) == (0, 0, 0)


def test_the_noise_of_a_plan_is_the_same_for_every_seed_and_part_of_its_trajectory(plan: MakePlan) -> None:
    digests = {
        setting: plan(setting).trajectory_digest()
        for setting in ("seed=0", "privacy.noise=0.6", "privacy.clip=2.0", "privacy.sharers=2")
    }
    assert len(set(digests.values())) == 4
    for setting in ("privacy.epsilon=4", "privacy.delta=1e-7"):
        assert plan(setting).trajectory_digest() == digests["seed=0"]
    resolved = plan("ring.n_max=1", "privacy.sharers=3")
    assert trajectory_of(resolved, 650).private is not None


def _totals(run: Path) -> list[I64]:
    """The totals of each round in a run's journal; none of a round that was skipped."""
    with Journal.open(run / "journal.sqlite") as journal:
        outcomes = [decode(entry.outcome_bytes, Outcome) for entry in journal.entries()]
    return [outcome.groups[0].numbers().astype(np.int64) for outcome in outcomes if outcome.groups]


def _adds_none(_: int) -> bytes:
    """Randomness that is always zero gives noise that is always zero."""
    return bytes(_)


@pytest.mark.parametrize(("mode", "least", "liars"), [("off", 5, 0), ("malicious-server", 7, 2)])
def test_the_noise_in_the_journal_is_that_of_its_survivors_and_never_less_than_claimed(
    plan: MakePlan, tmp_path: Path, mode: str, least: int, liars: int
) -> None:
    """So much noise that what clients measure vanishes in it. Of nine clients some drop; two may lie and add none."""
    k = 500
    settings = ("federation.clients=9", f"probe.k={k}", "secure.floor=5", "federation.dropout=0.15", "rounds=10")
    chosen = plan(*settings, "federation.batch=4", "privacy.noise=1000", f"secure.mode={mode}")
    simulate(chosen, tmp_path / "run", randomness=lambda number: _adds_none if number < liars else fixed(number))
    trajectory = trajectory_of(load(str(tmp_path / "run" / "plan.toml")), 650)
    assert trajectory.private is not None
    share, claimed = float(trajectory.private.share), float(trajectory.private.variance)
    survivors = [[client for client in range(9) if not drops(trajectory, number, client)] for number in range(10)]
    summed = [alive for alive in survivors if len(alive) >= least]
    assert len({len(alive) for alive in summed}) > 2
    spread = 5 * math.sqrt(2 / k)
    for alive, totals in zip(summed, _totals(tmp_path / "run"), strict=True):
        honest = sum(client >= liars for client in alive)
        assert np.var(totals) == pytest.approx(honest * share, rel=spread)
        assert np.var(totals) > claimed * (1 - spread)
