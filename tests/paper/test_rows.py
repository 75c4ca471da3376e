"""The paper's figures beside our runs of tables 1 and 2."""

import pytest

from baffle.paper import table1, table2
from baffle.paper.training_runs import TrainingRuns
from baffle.plan import WRN

TABLE1, TABLE2 = table1.TARGET, table2.TARGET


@pytest.mark.parametrize("table", [TABLE1, TABLE2], ids=lambda table: table.name)
def test_the_papers_figures_grow_with_k_and_stay_below_backpropagation(table: TrainingRuns) -> None:
    groups = {row.group for row in table.rows["full"].values()}
    assert len(groups) == (6 if table is TABLE1 else 4)
    for group in groups:
        figures = [row.paper for row in table.rows["full"].values() if row.group == group and row.paper is not None]
        by_k, rest = figures[:3], figures[3:]
        assert by_k == sorted(by_k)
        assert max(figures) == rest[-1]


def test_top_5_counts_where_the_paper_counts_it() -> None:
    for table in (TABLE1, TABLE2):
        for name, plan in table.plans("full").items():
            row = table.rows["full"][name]
            assert (row.shown == "test_top5") == (plan.task.data == "cifar100") == ("top-5" in name)
            assert plan.task.augment == plan.task.data.startswith("cifar")
            assert plan.rounds == (40 if plan.task.augment else 20)
            assert isinstance(plan.task.model, WRN) == name.startswith("WRN-10-2")
