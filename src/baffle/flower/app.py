"""BAFFLE as a Flower App: `flwr run` starts it on a SuperLink with SuperNodes, or in Flower's simulation.

    server      runs the configured plan with the nodes that are online
    client      answers one message; a stock SuperNode starts a process for each message

Between two messages a client exists as bytes in its node's memory. Its marks must survive the node, so they are kept
beside its key, as with `baffle join`.
"""

import fcntl
import json
import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, get_args

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from baffle.aggregation.messages import Request
from baffle.client.abstaining import abstention
from baffle.core.messages import tag_of
from baffle.errors import BaffleError, KeysError, MessageError, PlanError, RunFolderError
from baffle.flower.grid_transport import NOT_OURS, RECORD, GridTransport, action, content_of, to_record
from baffle.flower.lines import FlowerLines, Who, with_identity
from baffle.network.joining import Asked
from baffle.network.keys.authority import ServerKeys
from baffle.network.keys.folders import ClientKeys
from baffle.network.member.equipment import with_onnx, with_plan
from baffle.network.member.member import NEEDS_WORK, Member
from baffle.network.member.policy import load_policy
from baffle.plan import Plan, load
from baffle.plan.arithmetic import vouch_for

if TYPE_CHECKING:
    from baffle.server.recorder import Progress

PROGRESS_INTERVAL = 5.0  # seconds between two log lines about a run's progress

STATE = "state"  # the key under which a ClientApp keeps its state in the node's memory of a run
Settings = Mapping[str, bool | int | float | str | bytes]  # a node's or a run's configuration, as Flower hands it over
T = TypeVar("T", bool, int, str)


class Delivery(NamedTuple):
    """The arguments of a ClientApp: a message's content, the state that it left in the node's memory last time, and the
    configurations of its node and of the run."""

    content: bytes
    state: bytes
    node: Settings
    run: Settings


def setting(configs: tuple[Settings, ...], name: str, default: T) -> T:
    """A setting, from the first of these configurations that has it."""
    value = next((config[name] for config in configs if config.get(name, "") != ""), default)
    if type(value) is not type(default):
        raise PlanError(f"{name}: expected {type(default).__name__}, got {value!r}")
    return value


def folder(configs: tuple[Settings, ...], name: str) -> Path | None:
    """A setting that is the path of a folder or file. It must be absolute: Flower starts processes in any folder."""
    text = setting(configs, name, "")
    if text and not Path(text).is_absolute():
        raise PlanError(f"{name}: expected an absolute path, got {text!r}")
    return Path(text) if text else None


def plan_of(configs: tuple[Settings, ...], default: str) -> Plan | None:
    """The plan that is configured, or the default; None if both are empty."""
    name = setting(configs, "plan", default)
    return load(name, tuple(shlex.split(setting(configs, "settings", "")))) if name else None


def play(nodes: GridTransport, config: Settings) -> None:
    """The ServerApp: serve the configured plan, as `baffle serve` does."""
    from baffle.network.server.serve import serve

    configs = (config,)
    plan, keys, out = plan_of(configs, "digits"), folder(configs, "keys"), folder(configs, "out")
    if plan is None or keys is None or out is None:
        raise PlanError("keys and out: expected folders, got none; name them with flwr run --run-config")
    roster = ServerKeys.load(keys / "server").roster
    lines = FlowerLines(nodes, roster.directory(), plan.run.deadline_seconds, tell)
    least, data = setting(configs, "least", 0), folder(configs, "data")
    tell(json.dumps(serve(plan, out, lines, roster, least=least, data=data, watch=_ProgressLog(), tell=tell)))


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
    """This client's keys, and the folder for its weights. The node's configuration names them; or the run's names a
    folder with the keys of all clients, and the node's partition number says which client this is."""
    own, state = (folder((delivery.node,), name) for name in ("keys", "state"))
    if own is not None:
        if state is None:
            raise KeysError(
                "node-config: keys without state; a client needs a folder for its copy of the weights: set state"
            )
        return ClientKeys.load(own), state
    all_keys, state = (folder((delivery.run,), name) for name in ("keys", "state"))
    number = setting((delivery.node,), "partition-id", -1)
    if all_keys is None or number < 0:
        raise KeysError("node-config: expected keys and state; or a partition-id, with keys in the run's configuration")
    name = f"client-{number}"
    return ClientKeys.load(all_keys / name), state / name if state else None


def _member(delivery: Delivery, own: ClientKeys, state: Path | None) -> Member:
    alone, number = (delivery.node,), own.number
    # The user who starts a run writes its configuration. A node with a key of its own takes no path from there.
    configs = alone if folder(alone, "keys") else (delivery.node, delivery.run)
    data, part = folder(configs, "data"), setting(configs, "part", False)
    model, policy = folder(alone, "model"), folder(alone, "policy")
    affords, pinned = setting(alone, "affords", 0), plan_of(alone, "")
    if pinned and setting(alone, "own-code", False):
        vouch_for(pinned)
    log, limits = (lambda words: tell(f"client {number}: {words}")), load_policy(policy) if policy else None
    if model:
        equip = with_onnx(number, data, model, part=part, approved=limits.models if limits else ())
    else:
        equip = with_plan(number, data, part=part)
    return Member(own, state, equip, affords, pinned, log, limits)


@contextmanager
def _exclusively(own: ClientKeys) -> Iterator[None]:
    """Answer one message at a time. A SuperNode may start two processes from the same memory; the second one waits
    here, and then finds the marks of the first."""
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

server = ServerApp()  # `flwr run` looks for these two names in the text of this file
client = ClientApp()


@server.main()
def _main(grid: Grid, context: Context) -> None:
    play(GridTransport(grid), context.run_config)


def _handle(message: Message, context: Context) -> Message:
    content = content_of(message)
    if content is None:
        raise MessageError(NOT_OURS)
    memory = context.state.get(RECORD)
    state = memory.get(STATE) if isinstance(memory, ConfigRecord) else None
    state = state if isinstance(state, bytes) else b""
    reply, state = answer(Delivery(content, state, context.node_config, context.run_config))
    context.state[RECORD] = ConfigRecord({STATE: state})
    return Message(to_record(reply), reply_to=message)


for name in ACTIONS:
    client.train(name)(_handle)
