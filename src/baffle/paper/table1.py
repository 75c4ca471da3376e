"""table1: K and the guidelines on clients with iid data, one local epoch a round."""

from collections.abc import Mapping, Sequence

from baffle.paper.guidelines import NOTES, NOTES_ON_DIGITS, guidelines
from baffle.paper.rows import Row, rows_of
from baffle.paper.settings import FEW_DIGITS, UNITS, Settings
from baffle.paper.training_runs import TrainingRuns

PAPER = {
    ("LeNet", "MNIST"): (87.27, 89.48, 92.18, 85.06, 81.55, 86.18, 76.02, 94.31),
    ("LeNet", "CIFAR-10"): (48.78, 51.82, 53.62, 47.97, 44.99, 48.65, 45.97, 58.75),
    ("LeNet", "CIFAR-100"): (41.54, 45.68, 48.72, 36.81, 39.49, 37.34, 36.53, 54.67),
    ("WRN-10-2", "MNIST"): (88.35, 89.57, 95.17, 85.89, 79.08, 76.44, 77.45, 97.11),
    ("WRN-10-2", "CIFAR-10"): (52.27, 55.59, 58.63, 50.01, 49.76, 43.37, 42.89, 62.29),
    ("WRN-10-2", "CIFAR-100"): (46.61, 51.65, 53.15, 45.86, 44.44, 41.79, 39.62, 60.08),
}
"""The paper's accuracies in percent, by model and data set, in the order of `_sweep`."""

_UNITS_EPOCH = (*UNITS, "probe.k=1600", "update.rate=0.01", "federation.steps=188")
"""188 local steps are an epoch in the paper's batches of 32. Here batches have 8, so a client sees a quarter of it."""

_SHORTER = (
    *NOTES,
    "The paper uses dense directions and many more samples. Here a direction touches one unit, so that runs get "
    "somewhere in minutes; a forward pass in the last column is only the part that this unit changes. Each row stands "
    "beside the paper's figure for its own smallest, middle or largest K: compare the order of rows, not the figures.",
)
_FULL = (
    *NOTES,
    "“Units” is not in the paper: a direction touches one unit and costs a part of a forward pass. A client takes 188 "
    "local steps a round in batches of 8; an epoch has 188 batches of 32.",
)


def _sweep(ks: Sequence[int]) -> dict[str, Settings]:
    """Each K, then the guidelines left out one by one at the smallest K, then backpropagation."""
    (_, at_smallest), *left_out = guidelines(ks[0]).items()
    return {
        f"K = {ks[0]}": at_smallest,
        **{f"K = {k}": (f"probe.k={k}",) for k in ks[1:]},
        **{f"K = {ks[0]}, {name}": settings for name, settings in left_out},
        "backpropagation": ("estimator=backprop",),
    }


def _lenet_on_mnist(sweep: Mapping[str, Settings]) -> dict[str, Row]:
    """The runs of a sweep beside the paper's figures for LeNet on MNIST."""
    figures = zip(sweep.items(), PAPER["LeNet", "MNIST"], strict=True)
    return {name: Row(settings, figure) for (name, settings), figure in figures}


TARGET = TrainingRuns(
    "table1",
    "iid, ten clients, epoch level: LeNet on MNIST; at full scale also WRN-10-2, CIFAR-10 and CIFAR-100",
    rows={
        "smoke": _lenet_on_mnist(_sweep((100, 200, 500))),
        "short": _lenet_on_mnist(_sweep((400, 800, 1600))),
        "full": {
            **rows_of(lambda data: _sweep((100, 200, 500) if data == "MNIST" else (200, 500, 1000)), PAPER),
            "LeNet, MNIST: K = 1600, units": Row(_UNITS_EPOCH, None, "LeNet, MNIST"),
        },
    },
    shared={
        "smoke": (*FEW_DIGITS, "federation.level=epoch", "federation.batch=0"),
        "short": (*UNITS, "federation.steps=20", "rounds=10", "run.evaluate_every=5"),
        "full": (),
    },
    notes={"smoke": NOTES_ON_DIGITS, "short": _SHORTER, "full": _FULL},
)
