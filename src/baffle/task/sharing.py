"""How many outer directions share a forward pass: what a plan gives, or what a model allows and memory permits."""

from baffle.core.ports import Batch
from baffle.errors import PlanError
from baffle.plan import ProbeSettings
from baffle.runtime.model import RunnableModel, Together

SHARED_PASS = 24 << 20
"""Bytes of tensors up to which directions share a pass: with more of them they leave the processor's cache."""

LARGEST_PASS = 1 << 30
"""Bytes of tensors that directions may take together at most, whoever wrote the plan."""


def share_passes(model: RunnableModel, probe: ProbeSettings, batch: Batch, room: int | None) -> Together:
    """How many outer directions share a pass of this batch, whose tensors take at most `room` bytes if that is known.
    If the plan gives a number that the model or memory does not allow, it is refused; else directions take a pass each,
    and the remark says why."""
    rule = LARGEST_PASS if probe.together else SHARED_PASS
    count, reason = model.together(probe, batch, rule if room is None else min(rule, room))
    if not probe.together:
        return Together(count, f"every outer direction takes a forward pass of its own: {reason}" if reason else "")
    if reason or 1 < count < min(probe.together, probe.k):
        reason = reason or f"more than {count} of them take too much memory"
        raise PlanError(
            f"probe.together: {probe.together} outer directions cannot share a forward pass: {reason}; set it to "
            f"{count}, or leave it out"
        )
    return Together(probe.together)
