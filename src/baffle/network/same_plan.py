"""Whether a plan that somebody was given is the plan of a run, which has been settled; and if not, what differs."""

from typing import Any

import msgspec

from baffle.errors import one_line
from baffle.network.rosters import Roster
from baffle.plan import Model, Plan, PrivacySettings

FREE = {"name", "rounds", "run"}
"""What a plan may change in a run that has begun."""

MOST_DIFFERENCES, MOST_CHARACTERS = 3, 60
"""How many differences are listed, and how much of a value is shown."""


def for_roster(plan: Plan, roster: Roster) -> Plan:
    """The plan with a client for each of the roster's places: an empty place counts as a client that is away."""
    return with_places(plan, len(roster.clients))


def with_places(plan: Plan, places: int) -> Plan:
    """The plan with so many places for clients."""
    return msgspec.structs.replace(plan, federation=msgspec.structs.replace(plan.federation, clients=places))


def differences(given: Plan, settled: Plan) -> str:
    """In what a given plan differs from a run's, as part of a sentence: "probe.k is 20 there and 50 here". Empty if it
    is the run's plan. It may differ in what it leaves open, in how long the run is, and in `run.*`."""
    here, there = _settings(_settled_like(given, settled)), _settings(settled)
    differing = sorted(name for name in here.keys() & there.keys() if here[name] != there[name])
    listed = [f"{name} is {_shown(there[name])} there and {_shown(here[name])} here" for name in differing]
    more = len(listed) - MOST_DIFFERENCES
    return ", ".join([*listed[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])


def _settled_like(given: Plan, settled: Plan) -> Plan:
    """The given plan, with what it leaves open taken from the settled one."""
    task, ring, probe, federation = given.task, given.ring, given.probe, given.federation
    if probe.supports == "auto":
        chosen = {name: getattr(settled.probe, name) for name in ("supports", "distribution")}
        probe = msgspec.structs.replace(probe, **chosen)
    return msgspec.structs.replace(
        given,
        task=msgspec.structs.replace(task, model=_filled_in(task.model, settled.task.model)),
        ring=msgspec.structs.replace(ring, n_max=ring.n_max or settled.ring.n_max),
        probe=msgspec.structs.replace(
            probe,
            micro_batch=probe.micro_batch or settled.probe.micro_batch,
            layout=probe.layout or settled.probe.layout,
            shapes=probe.shapes or settled.probe.shapes,
            together=probe.together or settled.probe.together,
        ),
        privacy=_noised_like(given.privacy, settled.privacy),
        update=msgspec.structs.replace(given.update, layers=given.update.layers or settled.update.layers),
        federation=msgspec.structs.replace(federation, tiers=federation.tiers or settled.federation.tiers),
    )


def _noised_like(given: PrivacySettings, settled: PrivacySettings) -> PrivacySettings:
    """The given settings of a private run, with the noise of the settled ones if that follows from a target."""
    if not given.on:
        return given
    noise, sharers = given.noise or settled.noise, given.sharers or settled.sharers
    return msgspec.structs.replace(given, noise=noise, sharers=sharers)


def _filled_in(given: Model, settled: Model) -> Model:
    """The given model, with what it leaves to the run taken from the settled one."""
    if type(given) is not type(settled):
        return given
    return msgspec.structs.replace(given, **{name: getattr(settled, name) for name in given.unsettled()})


def _settings(plan: Plan) -> dict[str, str]:
    """Every setting that a run keeps, by its dotted name, as JSON. Models of two kinds share the setting `name`, so at
    least that one differs."""
    settings: dict[str, str] = {}

    def add(table: dict[str, Any], path: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                add(value, f"{path}{name}.")
            else:
                settings[f"{path}{name}"] = msgspec.json.encode(value).decode()

    add({name: value for name, value in msgspec.to_builtins(plan).items() if name not in FREE}, "")
    return settings


def _shown(value: str) -> str:
    return one_line(value, MOST_CHARACTERS)
