"""`baffle join`: one client of a networked run."""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from baffle.cli.log import Log, Style
from baffle.cli.options import engine_option, log_option, path, stopped_by_sigterm
from baffle.errors import KeysError, RunFolderError
from baffle.files import make_folder

if TYPE_CHECKING:
    from baffle.network.keys.folders import ClientKeys
    from baffle.network.member.member import Member
    from baffle.plan import Derivatives

SMALL = {
    **{"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    **{"PYTHONOPTIMIZE": "2", "PYTHONNODEBUGRANGES": "1"},
}
"""The environment of a client on ONNX Runtime. It uses one thread, and each further thread or arena costs megabytes; so
do docstrings, and the columns that Python keeps for tracebacks."""


MODEL_HASH = """Run the model in --model although it is none of BAFFLE's own, if this is its hash, which `baffle export`
prints (or name it in the policy)."""


@click.command()
@click.argument("address")
@click.option(
    "--keys", "keys_folder", type=path, required=True, help="This client's folder that `baffle keys new` made."
)
@click.option(
    "--state",
    type=path,
    required=True,
    help="This client's own folder, for its copy of the weights. It must survive restarts.",
)
@click.option(
    "--data", type=path, help="Folder of this client's samples, in the formats of docs/data.md (default: $BAFFLE_DATA)."
)
@click.option("--part", is_flag=True, help="The folder holds the samples of all clients; use this client's part.")
@click.option("--model", type=path, help="Run this exported model on ONNX Runtime (default: the plan's own model).")
@click.option("--model-hash", "hashes", multiple=True, metavar="SHA256", help=MODEL_HASH)
@click.option(
    "--runtime",
    type=click.Choice(["onnx", "torch"]),
    help="Run the plan's own model on this (default: ONNX Runtime if it can, else PyTorch).",
)
@click.option(
    "--derivatives",
    type=click.Choice(["probes", "gradient"]),
    default="probes",
    help="With gradient, one backward pass on PyTorch takes the place of K forward passes (default: probes).",
)
@click.option(
    "--affords", type=click.IntRange(0), default=0, help="Evaluate at most this many directions a round (default: all)."
)
@click.option(
    "--policy",
    "policy_file",
    type=path,
    help="A TOML file that says which plans this client accepts (default: see docs/policy.md).",
)
@click.option("--plan", "pinned", help="Take part in this plan only.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a setting of --plan.")
@click.option(
    "--own-code", is_flag=True, help="Call the optimizer, schedule and distribution that --plan names as functions."
)
@click.option("--insecure", is_flag=True, help="Connect without TLS, to a server that was started with --insecure.")
@click.option("--stay", is_flag=True, help="After a run, wait for the next one.")
@engine_option
@log_option
def join(
    address: str,
    keys_folder: Path,
    state: Path,
    data: Path | None,
    part: bool,
    model: Path | None,
    hashes: tuple[str, ...],
    runtime: str | None,
    derivatives: "Derivatives",
    affords: int,
    policy_file: Path | None,
    pinned: str | None,
    settings: tuple[str, ...],
    own_code: bool,
    insecure: bool,
    stay: bool,
    log_style: Style,
) -> None:
    """Take part in a server's runs as one client. The server is at ADDRESS (host:port)."""
    if model and runtime:
        raise click.UsageError("--model runs on ONNX Runtime; give no --runtime with it")
    if derivatives == "gradient" and (model or runtime == "onnx"):
        raise click.UsageError("--derivatives gradient needs PyTorch; give neither --model nor --runtime onnx with it")
    if own_code and not pinned:
        raise click.UsageError("--own-code belongs to --plan, which names the functions")
    if hashes and not model:
        raise click.UsageError("--model-hash belongs to --model")
    if model and not SMALL.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**SMALL, **os.environ})
    from baffle.core.freed_memory import keep_freed_memory
    from baffle.network.keys.folders import ClientKeys
    from baffle.network.member.equipment import with_onnx, with_plan
    from baffle.network.member.member import Member
    from baffle.network.member.policy import load_policy
    from baffle.network.settling import require_clients_of_their_own
    from baffle.plan import load
    from baffle.plan.arithmetic import vouch_for

    if not model:  # a device has little memory to keep
        keep_freed_memory()
    own = ClientKeys.load(keys_folder)
    log = Log(log_style, f"client {own.number}", state / "join.log")
    policy = load_policy(policy_file) if policy_file else None
    if model:
        equip = with_onnx(own.number, data, model, part=part, approved=(*hashes, *(policy.models if policy else ())))
    else:
        equip = with_plan(own.number, data, part=part, runtime=runtime or "", derivatives=derivatives)
    expected = load(pinned, settings) if pinned else None
    if expected:
        require_clients_of_their_own(expected)
        if own_code:
            vouch_for(expected)
    with ExitStack() as stack:
        stack.enter_context(stopped_by_sigterm(log, "the same command joins again"))
        stack.enter_context(_alone(state, keys_folder))  # before the marks are read: another process may change them
        member = stack.enter_context(closing(Member(own, state, equip, affords, expected, log, policy)))
        take_part(address, own, member, log, insecure=insecure, stay=stay)


def take_part(
    address: str, own: "ClientKeys", member: "Member", log: Callable[[str], None], *, insecure: bool, stay: bool
) -> None:
    """Answer the server's requests until the run is over; with `stay`, the requests of later runs too."""
    from baffle.network.link.client import Line, client_tls

    with Line(address, own, None if insecure else client_tls(own), log) as line:
        for request in line.requests():
            reply = member.answer(request.body)
            line.allow(member.most_request_bytes)
            line.reply(request, reply)
            if member.revoked:
                raise KeysError(member.revoked)
            if member.over:
                log("the run is over")
                member.over = False
                if not stay:
                    return


@contextmanager
def _alone(state: Path, keys: Path) -> Iterator[None]:
    """Lock a client's folders for this process: two with the same marks could each answer about the same weights."""
    with ExitStack() as locks:
        for folder, option in ((state, "--state"), (keys, "--keys")):
            try:
                make_folder(folder)
                lock = os.open(folder, os.O_RDONLY)
                locks.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(f"{folder} is in use by another client; each needs its own {option}") from None
            except OSError as fault:
                raise RunFolderError(f"{folder} cannot be used: {fault.strerror or fault}; give another") from None
        yield
