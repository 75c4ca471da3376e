"""All targets, by name."""

from baffle.errors import PlanError
from baffle.paper.fedzo import FEDZO
from baffle.paper.fig_attack.target import Attack
from baffle.paper.sigma import Sigma
from baffle.paper.table2 import TABLE2
from baffle.paper.table3 import TABLE3, TABLE3_OFFICEHOME
from baffle.paper.table4 import Memory
from baffle.paper.target import Target
from baffle.paper.theorem2 import Alignment
from baffle.paper.training_runs import FIG_ABLATION, FIG_K, TABLE1

TARGETS: dict[str, Target] = {
    one.name: one
    for one in (
        TABLE1,
        TABLE2,
        TABLE3,
        TABLE3_OFFICEHOME,
        Memory(),
        FIG_K,
        FIG_ABLATION,
        Attack(),
        Alignment(),
        Sigma(),
        FEDZO,
    )
}


def target(name: str) -> Target:
    if name not in TARGETS:
        raise PlanError(f"no target is called {name!r}; expected one of {', '.join(TARGETS)}")
    return TARGETS[name]
