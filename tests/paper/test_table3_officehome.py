"""table3-officehome: table3 on other data, and nothing else."""

import pytest

from baffle.paper.domains import KS, OFFICEHOME
from baffle.paper.table3 import TARGET as PACS
from baffle.paper.table3_officehome import TARGET as TARGET_OFFICEHOME
from baffle.paper.target import Scale


@pytest.mark.parametrize("scale", ["short", "full"])
def test_table_3_differs_between_its_data_sets_in_the_data_alone(scale: Scale) -> None:
    ours, theirs = PACS.plans(scale), TARGET_OFFICEHOME.plans(scale)
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
