"""All targets by name. A new one is a module of this package that defines `TARGET`, and its line in `BUILT_IN`."""

from importlib import import_module

from baffle.errors import PlanError
from baffle.paper.target import Target

BUILT_IN = (
    "table1",
    "table2",
    "table3",
    "table3_officehome",
    "table4",
    "fig_k",
    "fig_ablation",
    "fig_attack",
    "theorem2",
    "sigma",
    "fedzo",
)
"""Modules, in the order in which `baffle paper --list` shows their targets."""

TARGETS: dict[str, Target] = {}


def register(target: Target) -> None:
    if target.name in TARGETS:
        raise PlanError(
            f"two targets are called {target.name!r}, and their pages would overwrite each other; rename one of them"
        )
    TARGETS[target.name] = target


def target(name: str) -> Target:
    if name not in TARGETS:
        raise PlanError(f"no target is called {name!r}; expected one of {', '.join(TARGETS)}")
    return TARGETS[name]


for module in BUILT_IN:
    register(import_module(f"baffle.paper.{module}").TARGET)
