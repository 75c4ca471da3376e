"""fig-k: accuracy against rounds for several K."""

from baffle.paper.guidelines import NOTES_ON_DIGITS
from baffle.paper.rows import Row
from baffle.paper.settings import FEW_DIGITS, UNITS
from baffle.paper.training_runs import TrainingRuns

_BACKPROPAGATION = {"backpropagation": Row(("estimator=backprop",))}

TARGET = TrainingRuns(
    "fig-k",
    "LeNet on MNIST, iid, ten clients, batch level: accuracy against rounds for several K",
    rows={
        "smoke": {**{f"K = {k}": Row((f"probe.k={k}",)) for k in (20, 100)}, **_BACKPROPAGATION},
        "short": {
            "K = 100, dense": Row(("probe.supports=dense", "probe.k=100")),
            **{f"K = {k}, units": Row((f"probe.k={k}",)) for k in (100, 400, 1600)},
            **_BACKPROPAGATION,
        },
        "full": {**{f"K = {k}": Row((f"probe.k={k}",)) for k in (20, 100, 500)}, **_BACKPROPAGATION},
    },
    shared={
        "smoke": FEW_DIGITS,
        "short": (*UNITS, "federation.level=batch", "rounds=300", "run.evaluate_every=10", "update.ema=0.98"),
        "full": ("federation.level=batch", "rounds=3750", "run.evaluate_every=50"),
    },
    notes={"smoke": NOTES_ON_DIGITS, "short": ("All rows use batches of 8 samples a client, and Adam at 0.02.",)},
)
