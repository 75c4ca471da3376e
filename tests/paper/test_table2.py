"""table2: the same runs with and without skew."""

from baffle.paper.table2 import TARGET


def test_table_2_shows_the_same_runs_with_and_without_skew() -> None:
    plans = TARGET.plans("short")
    for name, plan in plans.items():
        other = plans[name.replace("Dirichlet", "iid")]
        assert other.federation.partition == "iid"
        assert (other.probe, other.estimator) == (plan.probe, plan.estimator)
        assert (plan.federation.partition == "dirichlet") == name.startswith("Dirichlet")
