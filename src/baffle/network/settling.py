"""What a networked run settles before its first round, when it knows its clients, and keeps beside its plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from baffle.errors import PlanError, RunFolderError, unwritable
from baffle.files import read_file, replace
from baffle.network.joining import Introduction
from baffle.plan import Plan, Tier
from baffle.schedule import tiers_of

SETTLED = "network.json"
"""The file in the run's folder that holds a `Settled`. It is written before the plan."""

MOST_BYTES = 2_000_000
"""No such file is longer: room for the tiers of a hundred thousand clients."""


class Settled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a networked run must keep beside its plan: a random name for the run, in hex, and how many directions each
    client evaluates."""

    run: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tiers: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**32)], ...]


def settle(plan: Plan, newcomers: Mapping[int, Introduction]) -> tuple[Plan, tuple[int, ...]]:
    """The plan with what follows from the clients' introductions: the largest number of samples, and tiers for clients
    that afford fewer directions than others. A client that has not connected yet is expected to afford them all."""
    ring, federation = plan.ring, plan.federation
    most = 1 if federation.weighting == "uniform" else max(newcomer.samples for newcomer in newcomers.values())
    tiers = tiers_of(plan)
    if plan.outcome_kind == "scalars" and not federation.tiers:
        for client, newcomer in newcomers.items():
            tiers[client] = min(newcomer.affords or plan.probe.k, plan.probe.k)
    slower = sorted({k for k in tiers if k < plan.probe.k})
    if slower and not federation.tiers and tiers.count(plan.probe.k) < plan.secure.floor and plan.secure.mode != "off":
        raise PlanError(
            f"probe.k: only {tiers.count(plan.probe.k)} clients afford {plan.probe.k} directions, so the server could "
            f"see their last values; expected at least {plan.secure.floor} such clients; set probe.k={slower[-1]}"
        )
    shares = tuple(Tier(k=k, share=tiers.count(k) / len(tiers)) for k in slower)
    return (
        msgspec.structs.replace(
            plan,
            ring=msgspec.structs.replace(ring, n_max=ring.n_max or most),
            federation=msgspec.structs.replace(federation, tiers=federation.tiers or shares),
        ),
        tuple(tiers),
    )


def read_settled(out: Path) -> Settled:
    path = out / SETTLED
    try:
        return msgspec.json.decode(read_file(path, MOST_BYTES), type=Settled)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise RunFolderError(
            f"{path} cannot be read: {fault}; the run in {out} was not begun by `baffle serve`, or is damaged"
        ) from None


def remove_settled(out: Path) -> None:
    """Remove what is left if a server was killed before it wrote its plan. No client learnt of that run."""
    try:
        for name in (SETTLED, f".{SETTLED}.new"):
            (out / name).unlink(missing_ok=True)
    except OSError as fault:
        raise RunFolderError(f"{out} cannot be used for a run: {fault.strerror or fault}; give another --out") from None


def write_settled(out: Path, settled: Settled) -> None:
    path = out / SETTLED
    try:
        replace(path, msgspec.json.encode(settled))
    except OSError as fault:
        raise unwritable(path, fault, "free some space or mend the disk, or give another --out") from None
