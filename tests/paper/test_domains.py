"""Accuracy by domain: the paper's averages and ours, and the distance from backpropagation."""

import pytest

from baffle.paper.domains import BACKPROPAGATION, OFFICEHOME, pairs
from baffle.paper.table3 import TARGET
from baffle.paper.target import Finished, Origin


@pytest.mark.parametrize("name", ["K = 20", "K = 50", "K = 100", "K = 200", "K = 500", BACKPROPAGATION])
def test_the_papers_averages_are_those_of_its_domains(name: str) -> None:
    *domains, average = OFFICEHOME[name].values()
    for which in (0, 1):
        assert average[which] == pytest.approx(sum(pair[which] for pair in domains) / 4, abs=0.02)


def test_every_domain_counts_the_same_in_an_average() -> None:
    summary = {"test_domains": {"a": {"accuracy": 0.5, "top5": 0.75}, "b": {"accuracy": 0.25, "top5": 1.0}}}
    assert pairs(summary)["average"] == (37.5, 87.5)


def test_points_count_from_the_better_row_of_backpropagation() -> None:
    averages = {"K = 500": 0.7, BACKPROPAGATION: 0.6, f"{BACKPROPAGATION}, rate 0.001": 0.65}
    plans = TARGET.plans("smoke")
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
    result = TARGET.result(runs, "smoke", None, lambda _: None)
    column = {name: [row[result.columns.index(name)] for row in result.rows] for name in result.columns}
    assert column["points from backpropagation"] == ["+5.00", "-5.00", "+0.00"]
    assert column["clients' loss"] == [1.5, 1.5, 1.5]
