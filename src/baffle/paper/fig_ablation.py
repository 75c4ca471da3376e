"""fig-ablation: the guidelines left out one by one, at equal forward passes."""

from baffle.paper.guidelines import NOTES, NOTES_ON_DIGITS, guidelines
from baffle.paper.rows import Row
from baffle.paper.settings import FEW_DIGITS, UNITS
from baffle.paper.training_runs import TrainingRuns


def _rows(k: int) -> dict[str, Row]:
    left_out = {name or "all guidelines": Row(settings) for name, settings in guidelines(k).items()}
    norms = {
        f"with {norm.title()}Norm": Row((f"probe.k={k}", f"task.model.norm={norm}")) for norm in ("group", "batch")
    }
    return {**left_out, **norms}


TARGET = TrainingRuns(
    "fig-ablation",
    "the guidelines one by one, at equal forward passes: LeNet on MNIST, batch level",
    rows={"smoke": _rows(20), "short": _rows(400), "full": _rows(100)},
    shared={
        "smoke": ("task.model.norm=none", *FEW_DIGITS),
        "short": (*UNITS, "federation.level=batch", "rounds=150", "run.evaluate_every=30", "update.ema=0.98"),
        "full": ("federation.level=batch", "rounds=3750", "run.evaluate_every=50"),
    },
    notes={"smoke": NOTES_ON_DIGITS, "short": NOTES, "full": NOTES},
)
