"""A whole federation in one process: start it, resume it, and compare it with backpropagation."""

import os
import secrets
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baffle.aggregation.candid import CandidSum
from baffle.aggregation.client.peers import reader
from baffle.aggregation.client.session import ClientSession
from baffle.aggregation.plain import PlainSum
from baffle.aggregation.server.secure_sum import SecureSum
from baffle.client.client import Client, Computing
from baffle.client.replica import Replica
from baffle.client.stack import Stack
from baffle.client.worker import Worker
from baffle.core.ports import Aggregation
from baffle.errors import JournalError, PlanError
from baffle.journal.folder import RunFolder
from baffle.journal.store import Journal
from baffle.plan import Plan, PrivacySettings, change, check, load, override
from baffle.plan.privacy import least_survivors
from baffle.plan.tasks import headline, is_own
from baffle.privacy.skellam import Randomness
from baffle.runtime.registry import runtime_of
from baffle.schedule import policy_of
from baffle.server.diagnosis import Warn
from baffle.server.recorder import Summary, Watch
from baffle.server.round import Played
from baffle.server.run import opened
from baffle.task.features import Backbones
from baffle.task.load import Runtimes, Task, load_task
from baffle.task.precision import require_precision
from baffle.trajectory import Trajectory, trajectory_of
from baffle.transport.dropouts import Dropouts
from baffle.transport.local import LocalTransport

Stop = Callable[[Played], bool]
"""Asked after every round whether the run should end with it."""


RandomnessOf = Callable[[int], Randomness]
"""A client's number → what it draws its noise from."""


def _of_the_system(_: int) -> Randomness:
    """The operating system's randomness, for every client."""
    return os.urandom


def _nothing(_: object) -> None:
    """Ignore a report."""


def _never(_: object) -> bool:
    """Do not stop."""
    return False


def simulate(
    plan: Plan,
    out: str | Path,
    *,
    data: str | Path | None = None,
    watch: Watch = _nothing,
    warn: Warn = _nothing,
    backbones: Backbones | None = None,
    randomness: RandomnessOf = _of_the_system,
) -> Summary:
    """Run a plan into a new folder. Runs that share `backbones` compute the features of a frozen backbone once. The
    run's own plan names its runtime: on another one, losses differ in the last bits when the run is resumed.
    `randomness` is what each client of a private run draws its noise from."""
    folder = RunFolder.new(Path(out))
    run = msgspec.structs.replace(plan.run, runtime=runtime_of(plan))
    task = load_task(msgspec.structs.replace(plan, run=run), data, backbones)
    return begin(folder, task, watch, warn, remarks=exposure(task.plan), randomness=randomness)


def begin(
    folder: RunFolder,
    task: Task,
    watch: Watch = _nothing,
    warn: Warn = _nothing,
    stop: Stop = _never,
    remarks: Iterable[str] = (),
    randomness: RandomnessOf = _of_the_system,
) -> Summary:
    """Play a task into a new folder. `remarks` are told before the first round, if the task can be played at all."""
    task.server.require_measurable()
    with task.model.one_thread_each():
        for advice in (*remarks, *task.server.remarks, *task.model.advice(), *require_precision(task)):
            warn(advice)
        with folder:
            folder.write_plan(task.plan.to_toml())
            return _run(folder, task, watch, warn, stop, randomness)


def exposure(plan: Plan) -> list[str]:
    """What the server can learn about a single client under this plan."""
    if plan.secure.mode == "off" and plan.privacy.on:
        return [
            "secure.mode is off: the sums are private, single vectors are not, since each has only its client's part "
            "of the noise. In a network such a plan is refused"
        ]
    if plan.secure.mode == "off":
        return [
            "secure.mode is off: the server sees every client's values. They are linear measurements of its gradient "
            "and can reveal single samples and labels"
        ]
    if plan.secure.floor < 3:
        return [f"secure.floor = {plan.secure.floor}: a sum over two clients tells each of them the other's values"]
    return []


def resume(
    path: str | Path,
    settings: Iterable[str] = (),
    *,
    data: str | Path | None = None,
    watch: Watch = _nothing,
    warn: Warn = _nothing,
    stop: Stop = _never,
    load_again: Callable[[Plan], Task] | None = None,
) -> Summary:
    """Continue a run. Settings may change how long and how it runs, but nothing that determines its weights.
    `load_again` gives the task of a run whose model and data no plan can name."""
    with RunFolder.existing(Path(path)) as folder:
        old = load(str(folder.plan))
        new = _changed(old, settings)
        task = load_again(new) if load_again else load_task(new, data)
        if task.plan != new:
            raise JournalError(f"{folder.plan} is not a resolved plan; expected the file that the run itself wrote")
        task.server.require_measurable()
        _require_simulation(folder)
        folder.write_plan(new.to_toml())
        with task.model.one_thread_each():
            return _run(folder, task, watch, warn, stop)


def _changed(old: Plan, settings: Iterable[str]) -> Plan:
    """The plan of a run that goes on with other settings, none of which may determine weights. That comes first: what a
    run has filled in, as its layout, would not fit a section that was changed, and would be named as the fault."""
    new = override(old, settings)
    if new.trajectory_digest() != old.trajectory_digest():
        raise PlanError(
            "a resumed run may change rounds, run.* and secure.* (but not the groups), and nothing else; start a new "
            "run with --out"
        )
    check(new)
    return new


def _require_simulation(folder: RunFolder) -> None:
    """Refuse a networked run: its clients have agreed to its rounds, and nobody else can play more of them."""
    if not Journal.begun(folder.journal):
        return
    with Journal.open(folder.journal) as journal:
        if journal.statements.networked:
            raise JournalError(
                f"{folder.path} holds a networked run; continue it with `baffle serve`, or repeat it with "
                f"`baffle run --as {shlex.quote(str(folder.path))}`"
            )


def baseline_of(plan: Plan) -> Plan:
    """The same plan, trained by backpropagation. It draws no directions, so it goes back to shared seeds. It needs
    PyTorch, whatever ran the plan itself. It has no noise: a clipping norm for scalars is none for gradients."""
    bare = msgspec.structs.replace(plan, privacy=PrivacySettings())
    baseline = change(
        bare, ['estimator = "backprop"', 'federation.seeds = "shared"', "probe.stacked = false", 'run.runtime = ""']
    )
    runtime_of(baseline)
    return baseline


def require_baseline(plan: Plan, data: str | Path | None = None) -> None:
    """Refuse a plan that backpropagation cannot train. A loss of the user's own is tried for its derivative."""
    baseline = baseline_of(plan)
    if is_own(plan.task.loss):
        load_task(baseline, data)


def add_baseline(path: str | Path, *, data: str | Path | None = None, watch: Watch = _nothing) -> Summary:
    """Train the plan of a finished run by backpropagation too, in the subfolder `baseline`, and add the result to the
    run's summary."""
    with RunFolder.existing(Path(path)) as folder:
        plan = load(str(folder.plan))
        subfolder = Path(path) / "baseline"
        if (subfolder / "plan.toml").exists():
            baseline = resume(subfolder, [f"rounds={plan.rounds}"], data=data, watch=watch)
        else:
            baseline = simulate(baseline_of(plan), subfolder, data=data, watch=watch)
        compared = (f"test_{headline(plan.task)}", "rounds", "seconds", "uplink_bytes_per_client_round")
        summary = folder.read_summary()
        summary |= {f"baseline_{name}": baseline[name] for name in compared if name in baseline}
        folder.write_summary(summary)
        return summary


def _run(
    folder: RunFolder, task: Task, watch: Watch, warn: Warn, stop: Stop, randomness: RandomnessOf = _of_the_system
) -> Summary:
    plan = task.plan
    trajectory = trajectory_of(plan, len(task.initial_weights()))
    runtimes = Runtimes(task, trajectory.threads)
    hidden, sessions = aggregation(trajectory, task)
    sums = CandidSum(hidden)
    clients: list[Client] = []

    def answer(number: int, message: bytes) -> bytes:
        return clients[number].answer(message)

    samples = {number: len(share) for number, share in enumerate(task.shares)}
    with (
        opened(folder, task.server, trajectory, runtimes, task.tiers, samples, watch, warn) as running,
        LocalTransport(answer, trajectory.threads, running.recorder.tick) as local,
    ):
        replica = Replica(running.lineage, running.present)
        for number, worker in enumerate(_workers(trajectory, task, runtimes, randomness)):
            clients.append(Client(replica, worker, sessions.get(number), sums.log_of(number)))
            running.downlink.holds(number, running.present.round)
        if running.unevaluated:
            warn(f"{headline(plan.task)} is not measured: {running.unevaluated}")
        transport = Dropouts(local, partial(drops, trajectory)) if plan.federation.dropout else local
        while not running.over:
            if stop(running.play(transport, sums)):
                break
        return running.finish()


def _workers(trajectory: Trajectory, task: Task, runtimes: Runtimes, randomness: RandomnessOf) -> Sequence[Computing]:
    """What computes each client's contributions."""
    alone = [
        Worker(number, k, trajectory, task.source.train, share, runtimes.borrow, randomness(number))
        for number, (k, share) in enumerate(zip(task.tiers, task.shares, strict=True))
    ]
    if not trajectory.plan.probe.stacked:
        return alone
    stack = Stack(trajectory, dict(enumerate(alone)), runtimes.borrow, partial(drops, trajectory))
    return [stack.worker(number) for number in range(len(alone))]


def aggregation(trajectory: Trajectory, task: Task) -> tuple[Aggregation, dict[int, ClientSession]]:
    """How replies become a sum, and each client's side of it. Identities are made afresh in every process."""
    plan = trajectory.plan
    if plan.secure.mode == "off":
        least = least_survivors(plan) if plan.privacy.on else 1
        return PlainSum(trajectory.ring, trajectory.length, least), {}
    identities = {number: Ed25519PrivateKey.generate() for number in range(plan.federation.clients)}
    directory = {number: identity.public_key().public_bytes_raw() for number, identity in identities.items()}
    run = secrets.token_bytes(32)
    policy = policy_of(trajectory, dict(enumerate(task.tiers)), run)
    read_keys = lru_cache(maxsize=4096)(reader(directory, run))
    sessions = {
        number: ClientSession(number, identity, directory, run, policy, read_keys=read_keys)
        for number, identity in identities.items()
    }
    return SecureSum(trajectory.ring, trajectory.length, run, directory, policy), sessions


def drops(trajectory: Trajectory, round_number: int, client: int) -> bool:
    """Whether a simulated client does not answer in a round. The plan alone determines it."""
    ticket = trajectory.seeds(round_number).key("dropout", round_number, client)[:8]
    return int.from_bytes(ticket, "big") < trajectory.plan.federation.dropout * 2**64
