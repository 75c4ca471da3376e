"""Whether a plan that somebody was given is the plan of a run, which has been settled."""

import msgspec

from baffle.errors import RefusalError
from baffle.network.keys import Roster
from baffle.plan import Model, Plan


def for_roster(plan: Plan, roster: Roster) -> Plan:
    """The plan with the roster's number of clients."""
    return msgspec.structs.replace(
        plan, federation=msgspec.structs.replace(plan.federation, clients=len(roster.clients))
    )


def require_same(pinned: Plan, offered: Plan) -> None:
    """Refuse an offered plan that is not the pinned one. It may differ in what the pinned plan leaves open, in how long
    the run is, and in `run.*`."""
    task, ring, probe, federation = pinned.task, pinned.ring, pinned.probe, pinned.federation
    settled = msgspec.structs.replace(
        pinned,
        task=msgspec.structs.replace(task, model=_filled_in(task.model, offered.task.model)),
        ring=ring if ring.n_max else msgspec.structs.replace(ring, n_max=offered.ring.n_max),
        probe=msgspec.structs.replace(
            probe,
            micro_batch=probe.micro_batch or offered.probe.micro_batch,
            layout=probe.layout or offered.probe.layout,
        ),
        federation=federation
        if federation.tiers
        else msgspec.structs.replace(federation, tiers=offered.federation.tiers),
    )
    if settled.trajectory_digest() != offered.trajectory_digest() or settled.secure != offered.secure:
        raise RefusalError("the server's plan is another than the one that this client takes part in")


def _filled_in(pinned: Model, offered: Model) -> Model:
    """The pinned model, with what it leaves to the run taken from the offered one."""
    if type(pinned) is not type(offered):
        return pinned
    return msgspec.structs.replace(pinned, **{name: getattr(offered, name) for name in pinned.unsettled()})
