"""Tables 1 to 3: their runs at each scale, the paper's figures for them, and accuracy by domain."""

import pytest

from baffle.paper.looks import LOOKS, digits_in_four_looks
from baffle.paper.table3 import BACKPROPAGATION, EXACT, KS, OFFICEHOME, TARGET as TABLE3, TARGET_OFFICEHOME, pairs
from baffle.paper.target import DRAWN, Finished, Origin, Scale, common_cells, draws_nothing, row_of, with_drawn
from baffle.paper.training_runs import TABLE1, TABLE2, TrainingRuns
from baffle.plan import WRN


@pytest.mark.parametrize(("table", "columns"), [(TABLE1, 6), (TABLE2, 4)], ids=["table1", "table2"])
def test_the_papers_figures_grow_with_k_up_to_backpropagation_and_top_5_counts_where_it_counts_it(
    table: TrainingRuns, columns: int
) -> None:
    rows = table.rows["full"].values()
    groups = {row.group for row in rows}
    assert len(groups) == columns
    for group in groups:
        figures = [row.paper for row in rows if row.group == group and row.paper is not None]
        assert figures[:3] == sorted(figures[:3])
        assert max(figures) == figures[-1]
    for name, plan in table.plans("full").items():
        row = table.rows["full"][name]
        assert (row.shown == "test_top5") == (plan.task.data == "cifar100") == ("top-5" in name)
        assert plan.task.augment == plan.task.data.startswith("cifar")
        assert plan.rounds == (40 if plan.task.augment else 20)
        assert isinstance(plan.task.model, WRN) == name.startswith("WRN-10-2")


@pytest.mark.parametrize(("scale", "data", "k"), [("smoke", "digits", 100), ("short", "mnist", 400)])
def test_smaller_scales_of_table_1_train_lenet_on_one_data_set(scale: Scale, data: str, k: int) -> None:
    plans = TABLE1.plans(scale)
    assert {plan.task.data for plan in plans.values()} == {data}
    assert plans.keys() >= {f"K = {k}", f"K = {k}, central", "backpropagation"}
    assert len(plans) == 8
    assert plans[f"K = {k}, central"].probe.k == k // 2


def test_table_2_shows_the_same_runs_with_and_without_skew() -> None:
    plans = TABLE2.plans("short")
    for name, plan in plans.items():
        other = plans[name.replace("Dirichlet", "iid")]
        assert other.federation.partition == "iid"
        assert (other.probe, other.estimator) == (plan.probe, plan.estimator)
        assert (plan.federation.partition == "dirichlet") == name.startswith("Dirichlet")


@pytest.mark.parametrize("scale", ["short", "full"])
def test_table_3_differs_between_its_data_sets_in_the_data_alone(scale: Scale) -> None:
    ours, theirs = TABLE3.plans(scale), TARGET_OFFICEHOME.plans(scale)
    assert ours.keys() == theirs.keys() > OFFICEHOME.keys()
    assert tuple(plan.probe.k for plan in ours.values() if plan.estimator == "probe" and not draws_nothing(plan)) == KS
    for name, plan in ours.items():
        other = theirs[name]
        assert (plan.task.data, other.task.data) == ("pacs", "officehome")
        assert (plan.rounds, plan.federation.clients) == (40, 40)
        assert plan.update.rate == (0.001 if name.endswith("rate 0.001") else 0.005)
        assert (plan.federation, plan.probe, plan.update) == (other.federation, other.probe, other.update)


def test_every_domain_counts_the_same_in_an_average_as_in_the_papers() -> None:
    for *domains, average in (figures.values() for figures in OFFICEHOME.values()):
        for which in (0, 1):
            assert average[which] == pytest.approx(sum(pair[which] for pair in domains) / 4, abs=0.02)
    summary = {"test_domains": {"a": {"accuracy": 0.5, "top5": 0.75}, "b": {"accuracy": 0.25, "top5": 1.0}}}
    assert pairs(summary)["average"] == (37.5, 87.5)


def test_points_count_from_the_better_row_of_backpropagation() -> None:
    averages = {"K = 500": 0.7, BACKPROPAGATION: 0.6, f"{BACKPROPAGATION}, rate 0.001": 0.65, EXACT: 0.625}
    plans = TABLE3.plans("smoke")
    losses, origin = [{"round": 0, "loss": 2.0}, {"round": 1, "loss": 1.5}], Origin("2026-11-16", "0123456789ab")
    runs = dict[str, list[Finished]]()
    for name, average in averages.items():
        summary = {"test_domains": {"a": {"accuracy": average, "top5": 1.0}}, "rounds": 2, "forwards": 16}
        summary["uplink_bytes_per_client_round"] = 52.5
        runs[name] = [Finished(plans[name], summary, losses, plans[name].digest().hex(), origin)]
    result = TABLE3.result(runs, "smoke", None, lambda _: None)
    column = {name: [row[result.columns.index(name)] for row in result.rows] for name in result.columns}
    assert column["points from backpropagation"] == ["+5.00", "-5.00", "+0.00", "-2.50"]
    assert column["clients' loss"] == [1.5] * 4
    assert column["bytes up"] == [52] * 4


def test_a_frozen_backbone_with_an_exact_head_draws_no_directions_so_it_has_no_k_and_no_drawn_twin() -> None:
    plans = TABLE3.plans("short")
    assert {name for name, plan in plans.items() if draws_nothing(plan)} == {EXACT, f"{EXACT}, rate 0.001"}
    for name in (EXACT, f"{EXACT}, rate 0.001"):
        summary = {"rounds": 40, "forwards": 10_800}
        run = Finished(plans[name], summary, [], plans[name].digest().hex(), Origin("2026-11-16", "0123456789ab"))
        assert (common_cells([run])["K"], common_cells([run])["scalars"]) == (None, "exact head")
        like = plans[name.replace(EXACT, BACKPROPAGATION)]
        assert (like.update, like.federation, like.rounds) == (run.plan.update, run.plan.federation, run.plan.rounds)
    twins = {row_of(name) for name in with_drawn(plans) if name.endswith(DRAWN)}
    assert twins == {f"K = {k}" for k in KS}


def test_the_digits_in_four_looks_have_four_domains() -> None:
    source = digits_in_four_looks()
    assert (source.domains, source.shape) == (LOOKS, (3, 32, 32))
    for part in (source.train, source.test):
        assert part.domain_of is not None
        assert set(part.domain_of.tolist()) == {0, 1, 2, 3}
