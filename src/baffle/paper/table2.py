"""table2: clients that hold few classes each, beside clients that hold equal shares of all classes."""

from baffle.paper.rows import Row, rows_of
from baffle.paper.settings import UNITS, Settings
from baffle.paper.training_runs import TrainingRuns

_CIFAR = ("task.data=cifar10", "task.augment=true")
_SKEWED, _EVEN = "federation.partition=dirichlet", "federation.partition=iid"


def _runs_on(_data: str) -> dict[str, Settings]:
    return {
        **{f"K = {k}": (f"probe.k={k}",) for k in (200, 500, 1000)},
        "backpropagation": ("estimator=backprop",),
    }


_FULL = rows_of(
    _runs_on,
    {
        ("LeNet", "CIFAR-10"): (35.21, 38.14, 39.71, 44.41),
        ("LeNet", "CIFAR-100"): (28.12, 30.92, 33.35, 38.43),
        ("WRN-10-2", "CIFAR-10"): (39.53, 41.69, 43.42, 51.18),
        ("WRN-10-2", "CIFAR-100"): (30.44, 32.89, 34.08, 40.85),
    },
)


def _skewed_and_even(few: int, many: int, backpropagation: Settings = ()) -> dict[str, Row]:
    """The same runs with clients of few classes and with clients of all classes."""
    return {
        f"{partition}: {name}": Row((setting, *settings), group=partition)
        for partition, setting in (("Dirichlet", _SKEWED), ("iid", _EVEN))
        for name, settings in {
            f"K = {few}, units": (f"probe.k={few}", "probe.supports=units"),
            f"K = {many}, units": (f"probe.k={many}", "probe.supports=units"),
            "backpropagation": ("estimator=backprop", *backpropagation),
        }.items()
    }


_NOTES = (
    "The accuracy is that of the averaged weights.",
    "In rows that say units, a direction touches one output unit of a layer and costs a part of a forward pass.",
)
_STEPS = (
    "Ten clients a round take ten local steps of 8 samples each. Probes use Adam at 0.01, which did better on skewed "
    "clients than 0.005 and 0.02 in shorter runs. Backpropagation uses it at 0.002, which does better than 0.02."
)

TARGET = TrainingRuns(
    "table2",
    "clients of few classes each (Dirichlet 0.3), 100 clients, one local epoch a round",
    {"smoke": _skewed_and_even(50, 100), "short": _skewed_and_even(200, 800, ("update.rate=0.002",)), "full": _FULL},
    {
        "smoke": (
            "federation.clients=20",
            "federation.participation=0.2",
            "federation.level=epoch",
            "federation.batch=0",
            "rounds=2",
            "run.evaluate_every=1",
        ),
        "short": (
            *(*_CIFAR, *UNITS, "federation.clients=100", "federation.participation=0.1"),
            *("federation.steps=10", "rounds=60", "run.evaluate_every=10", "update.rate=0.01"),
        ),
        "full": (_SKEWED, "federation.clients=100"),
    },
    {"smoke": _NOTES, "short": (*_NOTES, _STEPS), "full": _NOTES},
)
