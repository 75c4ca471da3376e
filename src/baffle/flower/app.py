"""BAFFLE as a Flower App: what `flwr run` starts, on a SuperLink with SuperNodes or in Flower's simulation.

    server      runs the plan in the run's configuration with the nodes that are present
    client      answers one message; a stock SuperNode starts a process for each message

Between two messages a client exists as bytes in its node's memory. Its marks must survive the node, so they lie beside
its key, as with `baffle join`.
"""

import fcntl
import json
import logging
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from baffle.aggregation.messages import Request
from baffle.client.abstaining import abstention
from baffle.core.messages import tag_of
from baffle.errors import BaffleError, KeysError, PlanError, RunFolderError
from baffle.flower.app_wrappers import Delivery, Settings, client_app, server_app
from baffle.flower.identify import Who, with_identity
from baffle.flower.lines import FlowerLines
from baffle.flower.records import action
from baffle.flower.run import AppRun
from baffle.network.authority import ServerKeys
from baffle.network.equipment import count_samples, with_onnx, with_plan
from baffle.network.joining import Asked
from baffle.network.keys import ClientKeys
from baffle.network.member import NEEDS_WORK, Member
from baffle.network.policy import load_policy
from baffle.plan import Plan, load

if TYPE_CHECKING:
    from baffle.server.recorder import Progress

PROGRESS_INTERVAL = 5.0
"""Seconds between two log lines about a run's progress."""

T = TypeVar("T", bool, int, str)


def setting(configs: tuple[Settings, ...], name: str, default: T) -> T:
    """A setting, from the first configuration that has it."""
    value = next((config[name] for config in configs if config.get(name, "") != ""), default)
    if type(value) is not type(default):
        raise PlanError(f"{name}: expected {type(default).__name__}, got {value!r}")
    return value


def folder(configs: tuple[Settings, ...], name: str) -> Path | None:
    """A folder, or a file. Flower starts its processes in any working directory, so the path must be absolute."""
    text = setting(configs, name, "")
    if text and not Path(text).is_absolute():
        raise PlanError(f"{name}: expected an absolute path, got {text!r}")
    return Path(text) if text else None


def plan_of(configs: tuple[Settings, ...], default: str) -> Plan | None:
    """The plan that is configured, or the default; None if both are empty."""
    name = setting(configs, "plan", default)
    return load(name, tuple(shlex.split(setting(configs, "settings", "")))) if name else None


def play(run: AppRun, config: Settings) -> None:
    """The ServerApp: serve the configured plan, as `baffle serve` does."""
    from baffle.network.serve import serve

    configs = (config,)
    plan = plan_of(configs, "digits")
    keys = folder(configs, "keys")
    out = folder(configs, "out")
    if plan is None or keys is None or out is None:
        raise PlanError("keys and out: expected folders, got none; name them with flwr run --run-config")
    roster = ServerKeys.load(keys / "server").roster
    summary = serve(
        plan,
        out,
        FlowerLines(run, roster.directory(), plan.run.deadline_seconds, tell),
        roster,
        least=setting(configs, "least", 0),
        data=folder(configs, "data"),
        watch=_ProgressLog(),
        tell=tell,
    )
    tell(json.dumps(summary))


def answer(delivery: Delivery) -> tuple[bytes, bytes]:
    """The ClientApp. Returns its reply, and the state that the node keeps until the next message."""
    try:
        own, state = _identify(delivery)
        with _exclusively(own):
            member = _member(delivery, own, state)
            try:
                member.thaw(delivery.state, idle=tag_of(delivery.content) not in NEEDS_WORK)
            except BaffleError as fault:
                tell(f"client {own.number}: must start over: {fault}")
            reply = with_identity(own.identity, own.number, member.answer)(delivery.content)
            return reply, b"" if member.over else member.frozen()
    except Exception as fault:  # Flower would send the text of any error that it sees to the server
        tell(f"cannot answer: {fault if isinstance(fault, BaffleError) else repr(fault)}")
        return abstention(delivery.content), delivery.state


def _identify(delivery: Delivery) -> tuple[ClientKeys, Path | None]:
    """This client's keys, and the folder for its weights. Its node names them; or the run names a folder with the keys
    of all clients, and the partition number says which of them this is."""
    own = folder((delivery.node,), "keys")
    if own is not None:
        state = folder((delivery.node,), "state")
        if state is None:
            raise KeysError(
                "node-config: keys without state; a client needs a folder for its copy of the weights: set state"
            )
        return ClientKeys.load(own), state
    all_keys = folder((delivery.run,), "keys")
    state = folder((delivery.run,), "state")
    number = setting((delivery.node,), "partition-id", -1)
    if all_keys is None or number < 0:
        raise KeysError("node-config: expected keys and state; or a partition-id, with keys in the run's configuration")
    name = f"client-{number}"
    return ClientKeys.load(all_keys / name), state / name if state else None


def _member(delivery: Delivery, own: ClientKeys, state: Path | None) -> Member:
    configs = (delivery.node, delivery.run)
    number = own.number
    data = folder(configs, "data")
    model = folder((delivery.node,), "model")
    policy = folder((delivery.node,), "policy")
    part = setting(configs, "part", False)
    return Member(
        own,
        state,
        count_samples(number, data, part=part),
        with_onnx(number, data, model, part=part) if model else with_plan(number, data, part=part),
        setting((delivery.node,), "affords", 0),
        plan_of((delivery.node,), ""),
        lambda words: tell(f"client {number}: {words}"),
        load_policy(policy) if policy else None,
    )


@contextmanager
def _exclusively(own: ClientKeys) -> Iterator[None]:
    """Answer one message at a time. A SuperNode may start two processes from the same memory; the second one waits
    here, and then sees the marks of the first."""
    folder = own.marks.parent
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError as fault:
        raise RunFolderError(f"{folder} cannot be used: {fault.strerror or fault}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def tell(words: str) -> None:
    """Write a line to Flower's log."""
    logging.getLogger("flwr").info(words)


class _ProgressLog:
    """Logs a run's progress every few seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: "Progress") -> None:
        if time.monotonic() - self._last < PROGRESS_INTERVAL:
            return
        self._last = time.monotonic()
        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        tell(f"round {progress.rounds_done:.0f} of {progress.rounds}{loss}")


ACTIONS = [action(str(kind.__struct_config__.tag)) for kind in (Who, *get_args(Asked), *get_args(Request))]

server = server_app(play)
client = client_app(ACTIONS, answer)
