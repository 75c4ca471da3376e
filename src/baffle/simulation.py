"""Run a whole federation in one process: start a run, resume it, compare it with backpropagation, or repeat a run that
was played over a network."""

import shlex
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec

from baffle.aggregation.plain import PlainSum
from baffle.client.worker import Stack
from baffle.errors import ChainError, JournalError, PlanError, RunFolderError
from baffle.federation import RandomnessOf, Sums, federation, sums_of, system_randomness, workers_of
from baffle.journal.folder import RunFolder
from baffle.journal.store import Journal
from baffle.measuring.precision import require_precision
from baffle.plan import Plan, PrivacySettings, Settings, change, check, load, override
from baffle.plan.functions import require_own_code
from baffle.plan.tasks import headline, is_own
from baffle.runtime.registry import runtime_of
from baffle.server.diagnosis import Warn
from baffle.server.recorder import Summary, Watch
from baffle.server.round import Played
from baffle.server.run import opened
from baffle.statement import read_statement
from baffle.task.features import Backbones
from baffle.task.load import Runtimes, Task, load_task
from baffle.trajectory import Trajectory, trajectory_of

Stop = Callable[[Played], bool | None]  # called after every round: whether the run should end


def _nothing(_: object) -> None:
    """Ignore a report, or never stop."""


def simulate(
    plan: Plan,
    out: str | Path,
    *,
    data: str | Path | None = None,
    watch: Watch = _nothing,
    warn: Warn = _nothing,
    backbones: Backbones | None = None,
    randomness: RandomnessOf = system_randomness,
) -> Summary:
    """Run a plan into a new folder.

    Runs that share `backbones` compute the features of a frozen backbone once. The run's own plan names its runtime,
    because losses on another one differ in the last bits. `randomness` gives each client of a private run the source of
    its noise.
    """
    folder = RunFolder.new(Path(out))
    run = msgspec.structs.replace(plan.run, runtime=runtime_of(plan))
    task = load_task(msgspec.structs.replace(plan, run=run), data, backbones)
    return begin(folder, task, watch, warn, remarks=exposure(task.plan), randomness=randomness)


def begin(
    folder: RunFolder,
    task: Task,
    watch: Watch = _nothing,
    warn: Warn = _nothing,
    stop: Stop = _nothing,
    remarks: Iterable[str] = (),
    randomness: RandomnessOf = system_randomness,
) -> Summary:
    """Play a task into a new folder. `remarks` are passed to `warn` before the first round."""
    task.require_measurable()
    with task.model.one_thread_each():
        for advice in (*remarks, *task.remarks, *task.model.advice(), *require_precision(task)):
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
    if plan.secure.mode == "malicious-server" and plan.federation.weighting != "uniform":
        return [
            'secure.mode is "malicious-server": a sum tells how many samples its clients have, and their loss. In a '
            'network such a plan is refused; set federation.weighting = "uniform"'
        ]
    if plan.secure.floor < 3:
        return [f"secure.floor = {plan.secure.floor}: a sum over two clients tells each of them the other's values"]
    return []


def resume(
    path: str | Path,
    settings: Settings = (),
    *,
    data: str | Path | None = None,
    watch: Watch = _nothing,
    warn: Warn = _nothing,
    stop: Stop = _nothing,
    load_again: Callable[[Plan], Task] | None = None,
    own_code: bool = False,
) -> Summary:
    """Continue a run. Settings may change how long and how it runs, but nothing that determines its weights.
    `load_again` loads the task of a run whose model and data are Python objects, which no plan can name. Functions that
    the run's plan names are called only with `own_code`, since the folder may be untrusted."""
    with RunFolder.existing(Path(path)) as folder:
        old = load(str(folder.plan))
        new = override(old, settings)
        # Checked first: a value that the run has filled in, such as its layout, may not fit the changed section.
        if new.trajectory_digest() != old.trajectory_digest():
            raise PlanError(
                "a resumed run may change rounds, run.* and secure.* (but not the groups), and nothing else; start a "
                "new run in another folder (--out, in Python out=…)"
            )
        check(new)
        require_own_code(new, folder.path, own_code=own_code)
        task = load_again(new) if load_again else load_task(new, data)
        if task.plan != new:
            raise JournalError(f"{folder.plan} is not a resolved plan; expected the file that the run itself wrote")
        task.require_measurable()
        _require_simulation(folder)
        folder.write_plan(new.to_toml())
        with task.model.one_thread_each():
            return _run(folder, task, watch, warn, stop)


def _require_simulation(folder: RunFolder) -> None:
    """Refuse a networked run: only its own clients can play more of its rounds."""
    if not Journal.begun(folder.journal):
        return
    with Journal.open(folder.journal) as journal:
        if journal.statements.networked:
            raise JournalError(
                f"{folder.path} holds a networked run; continue it with `baffle serve`, or repeat it with "
                f"`baffle run --as {shlex.quote(str(folder.path))}`"
            )


def baseline_of(plan: Plan) -> Plan:
    """The same plan, trained by backpropagation. It draws no directions, so its seeds are shared. It needs PyTorch,
    whatever ran the plan itself. It has no noise, because a clipping norm for scalars does not suit gradients."""
    bare = msgspec.structs.replace(plan, privacy=PrivacySettings())
    baseline = change(
        bare,
        [
            'estimator = "backprop"',
            'federation.seeds = "shared"',
            "federation.local_steps = 1",
            "probe.stacked = false",
            'run.derivatives = "probes"',
            'run.runtime = ""',
        ],
    )
    runtime_of(baseline)
    return baseline


def require_baseline(plan: Plan, data: str | Path | None = None) -> None:
    """Refuse a plan that backpropagation cannot train. The user's own loss is differentiated once, as a trial."""
    baseline = baseline_of(plan)
    if is_own(plan.task.loss):
        load_task(baseline, data)


def add_baseline(
    path: str | Path, *, data: str | Path | None = None, watch: Watch = _nothing, own_code: bool = False
) -> Summary:
    """Train a finished run's plan by backpropagation too, in its subfolder `baseline`, and add it to the summary."""
    with RunFolder.existing(Path(path)) as folder:
        plan = load(str(folder.plan))
        require_own_code(plan, folder.path, own_code=own_code)
        subfolder = Path(path) / "baseline"
        if subfolder.is_symlink():
            raise RunFolderError(f"{subfolder} is a link, and nothing is written through links; remove it")
        if (subfolder / "plan.toml").exists():
            baseline = resume(subfolder, [f"rounds={plan.rounds}"], data=data, watch=watch, own_code=own_code)
        else:
            baseline = simulate(baseline_of(plan), subfolder, data=data, watch=watch)
        compared = (f"test_{headline(plan.task)}", "rounds", "seconds", "uplink_bytes_per_client_round")
        summary = folder.read_summary()
        summary |= {f"baseline_{name}": baseline[name] for name in compared if name in baseline}
        folder.write_summary(summary)
        return summary


def _run(
    folder: RunFolder, task: Task, watch: Watch, warn: Warn, stop: Stop, randomness: RandomnessOf = system_randomness
) -> Summary:
    plan = task.plan
    trajectory = trajectory_of(plan, len(task.initial_weights()))
    runtimes = Runtimes(task, trajectory.threads)
    samples = {number: len(share) for number, share in enumerate(task.shares)}
    is_away = partial(drops, trajectory)
    with (
        opened(folder, task, trajectory, runtimes, task.tiers, samples, watch, warn) as running,
        federation(trajectory.threads, sums_of(trajectory, task), is_away) as clients,
    ):
        workers = workers_of(task, trajectory, runtimes.borrow, None, randomness, running.recorder.passed)
        stack = Stack(trajectory, dict(enumerate(workers)), runtimes.borrow, is_away) if plan.probe.stacked else None
        clients.enter(running.lineage, running.present, workers, running.downlink, stack)
        if running.unevaluated:
            warn(f"{headline(plan.task)} is not measured: {running.unevaluated}")
        while not running.over:
            if stop(running.play(clients, clients)):
                break
        return running.finish()


def drops(trajectory: Trajectory, round_number: int, client: int) -> bool:
    """Whether a simulated client does not answer in a round. The plan alone determines it."""
    if not trajectory.plan.federation.dropout:
        return False
    ticket = trajectory.seeds(round_number).key("dropout", round_number, client)[:8]
    return int.from_bytes(ticket, "big") < trajectory.plan.federation.dropout * 2**64


def repeat(
    path: str | Path,
    out: str | Path,
    settings: Settings = (),
    *,
    data: str | Path | None = None,
    watch: Watch = _nothing,
    own_code: bool = False,
) -> Summary:
    """Repeat the networked run in a folder, into a new folder.

    Every round has the contributors that the journal names. Each client has the samples of the plan's partition. If
    these are the samples that it had in the network, the weights are the same, bit for bit. Settings may change `run.*`
    only: network clients choose their own runtimes, and `run.runtime` names the one to repeat.
    """
    original = RunFolder.existing(Path(path))
    folder = RunFolder.new(Path(out))
    with Journal.open(original.journal) as journal:
        if not journal.statements.networked:
            raise JournalError(f"{path} holds no networked run with statements; a simulation is repeated by its plan")
        plan = change(journal.plan(), settings)
        require_own_code(plan, original.path, own_code=own_code)
        if msgspec.structs.replace(plan, run=journal.plan().run) != journal.plan():
            raise PlanError("a repeated run may change run.* and nothing else; leave the other settings out")
        if plan.privacy.on:
            raise PlanError(
                "a run with noise can be verified, not repeated: its clients' noise was drawn once and is kept "
                f"nowhere; `baffle verify {shlex.quote(str(path))}` checks it"
            )
        task = load_task(plan, data)
        if task.plan != plan:
            raise JournalError(f"{original.plan} is not a resolved plan; expected the file that the run itself wrote")
        with task.model.one_thread_each(), folder:
            folder.write_plan(plan.to_toml())
            return _repeated(folder, task, journal, watch)


def _repeated(folder: RunFolder, task: Task, journal: Journal, watch: Watch) -> Summary:
    trajectory = trajectory_of(task.plan, len(task.initial_weights()))
    runtimes = Runtimes(task, trajectory.threads)
    records = journal.statements.epochs_with_rosters()
    epochs = [(read_statement(record.statement), record, roster) for record, roster in records]
    tiers = epochs[0][0].tiers if epochs else task.tiers
    samples = {number: len(share) for number, share in enumerate(task.shares)}
    sums: Sums = PlainSum(trajectory.ring, trajectory.length), {}
    contributors = set[int]()  # to the present round of the original

    def is_away(_round: int, client: int) -> bool:
        return client not in contributors

    with (
        opened(folder, task, trajectory, runtimes, tiers, samples, watch, networked=True) as running,
        federation(trajectory.threads, sums, is_away) as clients,
    ):

        def begin_epochs() -> None:
            """Begin the epochs that the original began with the present round."""
            while epochs and epochs[0][0].first == running.present.round:
                statement, record, roster = epochs.pop(0)
                running.begin_epoch(record, roster)
                passed = running.recorder.passed
                workers = workers_of(task, running.trajectory, runtimes.borrow, statement.tiers, passed=passed)
                clients.enter(running.lineage, running.present, workers, running.downlink)

        for entry in journal.entries():
            begin_epochs()
            contributors.clear()
            contributors.update(journal.participation.contributors(entry.round))
            running.play(clients, clients)
            if running.journal.entry(entry.round).chain != entry.chain:
                raise ChainError(
                    f"round {entry.round} does not come out as in the original: the clients had other samples than the "
                    "plan's partition gives them, another runtime (try --set run.runtime=torch or onnx), or other "
                    "versions of the libraries",
                    entry.round,
                )
        begin_epochs()
        return running.finish()
