"""The paper's guidelines as runs: all of them together, and each left out."""

from baffle.paper.settings import Settings


def guidelines(k: int) -> dict[str, Settings]:
    """Every guideline at this K (the row without a name), then each left out. Central differences get half the K, which
    takes as many forward passes."""
    at_k = (f"probe.k={k}",)
    return {
        "": at_k,
        "without EMA": (*at_k, "update.ema=0"),
        "ReLU": (*at_k, "task.model.activation=relu"),
        "SELU": (*at_k, "task.model.activation=selu"),
        "central": (f"probe.k={k // 2}", "probe.scheme=central"),
    }


NOTES = (
    "Forward differences with twice the K of central ones (twice-FD) take as many forward passes.",
    "The accuracy is that of the averaged weights where there is an average.",
)
NOTES_ON_DIGITS = (*NOTES, "On the digits, to see that it works: the accuracies mean nothing.")
