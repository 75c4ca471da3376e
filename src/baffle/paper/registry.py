"""All targets by name. To add one, define it in a module of this package and add it to `BUILT_IN`."""

from baffle.errors import PlanError
from baffle.paper import fedzo, gradients, law, sigma, table3, table4, training_runs
from baffle.paper.fig_attack import target as fig_attack
from baffle.paper.target import Target

BUILT_IN: tuple[Target, ...] = (  # in the order of `baffle paper --list`
    *(training_runs.TABLE1, training_runs.TABLE2, table3.TARGET, table3.TARGET_OFFICEHOME, table4.TARGET),
    *(training_runs.FIG_K, training_runs.FIG_ABLATION, fig_attack.TARGET, gradients.THEOREM2),
    *(sigma.TARGET, law.TARGET, fedzo.TARGET),
)
TARGETS = {target.name: target for target in BUILT_IN}


def target(name: str) -> Target:
    if name not in TARGETS:
        raise PlanError(f"no target is called {name!r}; expected one of {', '.join(TARGETS)}")
    return TARGETS[name]
