"""BAFFLE as a Flower App: what `flwr run` starts, on a SuperLink with SuperNodes or in Flower's simulation.

    server      plays the plan of the run's configuration with whichever nodes are there
    client      answers one message; a stock SuperNode starts a process for each

Between two messages a client is bytes in its node's memory. What must survive the node itself, its marks, is in its
folder, as with `baffle join`.
"""

import fcntl
import json
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from baffle.aggregation.messages import Request
from baffle.core.messages import Abstention, encode, tag_of
from baffle.errors import BaffleError, KeysError, PlanError, RunFolderError
from baffle.flower.app_wrappers import Delivery, Settings, client_app, server_app
from baffle.flower.grid_transport import FlowerNodes
from baffle.flower.records import action
from baffle.flower.run import AppRun
from baffle.network.authority import ServerKeys
from baffle.network.equipment import count_samples, with_onnx, with_torch
from baffle.network.joining import Asked
from baffle.network.keys import ClientKeys
from baffle.network.member import NEEDS_WORK, Member
from baffle.plan import Plan, load

if TYPE_CHECKING:
    from baffle.server.recorder import Progress

EVERY = 5.0
"""Seconds between two lines about a run's progress."""

T = TypeVar("T", bool, int, str)


def setting(configs: tuple[Settings, ...], name: str, default: T) -> T:
    """A setting of the first configuration that has it."""
    found = next((config[name] for config in configs if config.get(name, "") != ""), default)
    if type(found) is not type(default):
        raise PlanError(f"{name}: expected {type(default).__name__}, got {found!r}")
    return found


def folder(configs: tuple[Settings, ...], name: str) -> Path | None:
    """A folder. Flower's processes run where they like, so it has to be named from the root on."""
    text = setting(configs, name, "")
    if text and not Path(text).is_absolute():
        raise PlanError(f"{name}: expected an absolute path, got {text!r}")
    return Path(text) if text else None


def plan_of(configs: tuple[Settings, ...], default: str) -> Plan | None:
    name = setting(configs, "plan", default)
    return load(name, tuple(shlex.split(setting(configs, "settings", "")))) if name else None


def play(run: AppRun, config: Settings) -> None:
    """The ServerApp."""
    from baffle.network.serve import serve

    configs = (config,)
    plan, keys, out = plan_of(configs, "digits"), folder(configs, "keys"), folder(configs, "out")
    if plan is None or keys is None or out is None:
        raise PlanError("keys and out: expected folders, got none; name them with flwr run --run-config")
    nodes = FlowerNodes(run, plan.run.deadline_seconds, lambda node, why: tell(f"node {node} failed: {why}"))
    summary = serve(
        plan,
        out,
        nodes,
        ServerKeys.load(keys / "server").roster,
        least=setting(configs, "least", 0),
        data=folder(configs, "data"),
        watch=_Watch(),
        tell=tell,
    )
    tell(json.dumps(summary))


def answer(delivery: Delivery) -> tuple[bytes, bytes]:
    """The ClientApp: a message and what its node remembers in, a reply and what the node is to remember out."""
    try:
        own, state = _self(delivery)
        member = _member(delivery, own, state)
        with _alone(state):
            try:
                member.thaw(delivery.state, idle=tag_of(delivery.content) not in NEEDS_WORK)
            except BaffleError as fault:
                tell(f"client {own.number}: has to begin anew: {fault}")
            reply = member.answer(delivery.content)
            return reply, b"" if member.over else member.frozen()
    except BaffleError as fault:
        return encode(Abstention(0, str(fault))), delivery.state


def _self(delivery: Delivery) -> tuple[ClientKeys, Path | None]:
    """Who this client is, and where it keeps its marks: as its node says, or one of many whose keys the run names."""
    own = folder((delivery.node,), "keys")
    if own is not None:
        state = folder((delivery.node,), "state")
        if state is None:
            raise KeysError(
                "node-config: keys without state; a client with keys of its own needs a folder for its marks"
            )
        return ClientKeys.load(own), state
    everybodys, state = folder((delivery.run,), "keys"), folder((delivery.run,), "state")
    number = setting((delivery.node,), "partition-id", -1)
    if everybodys is None or number < 0:
        raise KeysError("node-config: expected keys and state; or a partition-id, and keys in the run's configuration")
    name = f"client-{number}"
    return ClientKeys.load(everybodys / name), state / name if state else None


def _member(delivery: Delivery, own: ClientKeys, state: Path | None) -> Member:
    configs = (delivery.node, delivery.run)
    number, data, model = own.number, folder(configs, "data"), folder((delivery.node,), "model")
    part = setting(configs, "part", False)
    return Member(
        own,
        state,
        count_samples(number, data, part=part),
        with_onnx(number, data, model, part=part) if model else with_torch(number, data, part=part),
        setting((delivery.node,), "affords", 0),
        plan_of((delivery.node,), ""),
        lambda words: tell(f"client {number}: {words}"),
    )


@contextmanager
def _alone(state: Path | None) -> Iterator[None]:
    """One message at a time. A SuperNode may start two processes from the same memory: the second to come here finds
    the marks of the first."""
    if state is None:
        yield
        return
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / "lock").open("wb")
    except OSError as fault:
        raise RunFolderError(f"{state} cannot be used: {fault.strerror or fault}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def tell(words: str) -> None:
    logging.getLogger("flwr").info(words)


class _Watch:
    """A line every few seconds."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, progress: "Progress") -> None:
        if time.monotonic() - self._told < EVERY:
            return
        self._told = time.monotonic()
        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        tell(f"round {progress.rounds_done:.0f} of {progress.rounds}{loss}")


ACTIONS = [action(str(kind.__struct_config__.tag)) for kind in (*get_args(Asked), *get_args(Request))]

server = server_app(play)
client = client_app(ACTIONS, answer)
