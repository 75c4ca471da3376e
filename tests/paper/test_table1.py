"""table1: which rows it has at which scale."""

from baffle.paper.table1 import TARGET
from baffle.paper.target import Scale


def test_smaller_scales_of_table_1_train_lenet_on_one_data_set() -> None:
    scales: dict[Scale, tuple[str, int]] = {"smoke": ("digits", 100), "short": ("mnist", 400)}
    for scale, (data, k) in scales.items():
        plans = TARGET.plans(scale)
        assert {plan.task.data for plan in plans.values()} == {data}
        assert plans.keys() >= {f"K = {k}", f"K = {k}, central", "backpropagation"}
        assert len(plans) == 8
        assert plans[f"K = {k}, central"].probe.k == k // 2
