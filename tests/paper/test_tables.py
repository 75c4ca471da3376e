"""The paper's tables of accuracies: their figures, and which rows they have at which scale."""

import pytest

from baffle.paper.looks import LOOKS, digits_in_four_looks
from baffle.paper.table2 import TABLE2
from baffle.paper.table3 import BACKPROPAGATION, KS, OFFICEHOME, TABLE3, TABLE3_OFFICEHOME, pairs
from baffle.paper.target import Finished, Origin, Scale
from baffle.paper.training_runs import TABLE1, Training
from baffle.plan import WRN


@pytest.mark.parametrize("table", [TABLE1, TABLE2], ids=lambda table: table.name)
def test_the_papers_figures_grow_with_k_and_stay_below_backpropagation(table: Training) -> None:
    groups = {row.group for row in table.rows["full"].values()}
    assert len(groups) == (6 if table is TABLE1 else 4)
    for group in groups:
        figures = [row.paper for row in table.rows["full"].values() if row.group == group and row.paper is not None]
        by_k, rest = figures[:3], figures[3:]
        assert by_k == sorted(by_k)
        assert max(figures) == rest[-1]


@pytest.mark.parametrize("name", ["K = 20", "K = 50", "K = 100", "K = 200", "K = 500", BACKPROPAGATION])
def test_the_papers_averages_are_those_of_its_domains(name: str) -> None:
    *domains, average = OFFICEHOME[name].values()
    for which in (0, 1):
        assert average[which] == pytest.approx(sum(pair[which] for pair in domains) / 4, abs=0.02)


def test_top_5_counts_where_the_paper_counts_it() -> None:
    for table in (TABLE1, TABLE2):
        for name, plan in table.plans("full").items():
            row = table.rows["full"][name]
            assert (row.shown == "test_top5") == (plan.task.data == "cifar100") == ("top-5" in name)
            assert plan.task.augment == plan.task.data.startswith("cifar")
            assert plan.rounds == (40 if plan.task.augment else 20)
            assert isinstance(plan.task.model, WRN) == name.startswith("WRN-10-2")


def test_smaller_scales_of_table_1_train_lenet_on_one_data_set() -> None:
    scales: dict[Scale, tuple[str, int]] = {"smoke": ("digits", 100), "short": ("mnist", 400)}
    for scale, (data, k) in scales.items():
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
    ours, theirs = TABLE3.plans(scale), TABLE3_OFFICEHOME.plans(scale)
    assert ours.keys() == theirs.keys() > OFFICEHOME.keys()
    assert tuple(plan.probe.k for plan in ours.values() if plan.estimator == "probe") == KS
    for name, plan in ours.items():
        assert plan.task.data == "pacs"
        assert (plan.rounds, plan.federation.clients) == (40, 40)
        assert plan.update.rate == (0.001 if name.endswith("rate 0.001") else 0.005)
        assert (plan.federation, plan.probe, plan.update) == (
            theirs[name].federation,
            theirs[name].probe,
            theirs[name].update,
        )


def test_every_domain_counts_the_same_in_an_average() -> None:
    summary = {"test_domains": {"a": {"accuracy": 0.5, "top5": 0.75}, "b": {"accuracy": 0.25, "top5": 1.0}}}
    assert pairs(summary)["average"] == (37.5, 87.5)


def test_points_count_from_the_better_row_of_backpropagation() -> None:
    averages = {"K = 500": 0.7, BACKPROPAGATION: 0.6, f"{BACKPROPAGATION}, rate 0.001": 0.65}
    plans = TABLE3.plans("smoke")
    runs = {
        name: Finished(
            plans[name],
            {"test_domains": {"a": {"accuracy": average, "top5": 1.0}}, "rounds": 2, "forwards": 16},
            [{"round": 0, "loss": 2.0}, {"round": 1, "loss": 1.5}],
            plans[name].digest().hex(),
            Origin("2026-11-16", "0123456789ab"),
        )
        for name, average in averages.items()
    }
    result = TABLE3.result(runs, "smoke", None, lambda _: None)
    column = {name: [row[result.columns.index(name)] for row in result.rows] for name in result.columns}
    assert column["points from backpropagation"] == ["+5.00", "-5.00", "+0.00"]
    assert column["clients' loss"] == [1.5, 1.5, 1.5]


def test_the_digits_in_four_looks_differ_by_domain() -> None:
    source = digits_in_four_looks()
    assert source.domains == LOOKS
    for part in (source.train, source.test):
        assert part.domain_of is not None
        assert set(part.domain_of.tolist()) == {0, 1, 2, 3}
    assert source.shape == (3, 32, 32)
