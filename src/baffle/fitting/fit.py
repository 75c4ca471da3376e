"""`baffle.fit`: train a model of your own on data of your own, with forward passes alone, in one call."""

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from msgspec.structs import replace as changed

from baffle.core.arrays import F32, I64
from baffle.core.ports import Batch, Runtime
from baffle.data.partition import share_out
from baffle.data.sources import Source
from baffle.errors import NoHeadError, PlanError, RunFolderError, UnusableDataError
from baffle.fitting.choice import LAST, choose_weights
from baffle.fitting.given_data import GivenData, given_data
from baffle.fitting.given_model import Function, GivenModel, GivenModule, given_metrics, what_trains, with_names
from baffle.fitting.progress import shown_progress
from baffle.fitting.run import Run
from baffle.journal.folder import PLAN, RunFolder, new_folder
from baffle.journal.replay import initial_weights
from baffle.plan import Custom, Plan, Settings, build, check, lay_over, load
from baffle.plan.functions import GIVEN, require_own_code
from baffle.plan.tasks import LOSSES, is_of_numbers
from baffle.runtime.model import FLOAT32
from baffle.server.recorder import Watch
from baffle.server.round import Played
from baffle.simulation import Stop, begin, resume as resume_simulation
from baffle.task.load import Task, load_task
from baffle.task.metrics import OF_CLASSES, evaluate, metrics_of

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

DEFAULTS: Mapping[str, Any] = {
    "name": "fit",
    "rounds": 200,
    "federation": {"batch": 16},
    "probe": {"k": 80, "distribution": "rademacher", "supports": "layers", "head": "exact"},
    "update": {"rate": 0.01, "ema": 0.99},
    "secure": {"mode": "off"},
}
"""At this rate, directions of one layer each did as well as dense ones at the end, and better on some nets
(docs/performance.md, "One layer at a time"), and an exact head did better still ("The last layer exactly"). A model
without one is probed in all layers. The sums are plain, because in one process there is no one to hide values from;
secure sums give the same bits."""

SIGMA_ROUNDED = {"dense": 0.03, "layers": 0.1}
"""σ by `probe.supports` where activations are rounded to integers (docs/performance.md, "Integers in the backbone")."""

GivenPlan = str | Plan | Settings | None
"""A preset's name or a TOML file, a plan, or settings such as {"rounds": 300, "probe.k": 50}."""

Callback = Callable[[Mapping[str, Any]], object]
"""Called after every round with what it measured: `round` (counted from 1), `loss`, and `test_…` where the model was
evaluated. If it returns True, the run ends with that round; it can be resumed."""


def fit(
    model: "nn.Module | str | Path",
    clients: Any,
    test: Any = None,
    *,
    validation: Any = None,
    loss: str | Function = "cross_entropy",
    metrics: str | Function | Sequence[str | Function] = (),
    train: str | Sequence[str] = "all",
    plan: GivenPlan = None,
    out: str | Path | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    progress: bool = True,
    overwrite: bool = False,
    seeds: int = 1,
) -> Run:
    """Train a model on the data of simulated clients, which only run it forward.

    `model` is any `nn.Module`, or the path of an ONNX file. `clients` is a list with the data of each client, a dict of
    them by name, or one data set that is shared out as the plan says (among ten clients, at random). Data are pairs (x,
    y) of arrays or tensors, map-style data sets of such pairs, or DataLoaders; x may be a tuple or a dict, which the
    model takes as its arguments. `test` is a pair, too; a dict of pairs by name of client; or the share of its own
    samples that each client is tested on instead of trained on, such as 0.2. Then `run["test_domains"]` has each
    client's metrics. `loss` is "cross_entropy", "mse", "mae", "bce" or any function of outputs and targets, with or
    without a derivative; `metrics` are names such as "accuracy" and "r2", or functions of outputs and targets as NumPy
    arrays. `train` chooses what is trained: "all", the "last" layer, names of parameters by pattern, or of an ONNX file
    also its "head", perhaps of integers, and the "scales" of integers. `plan` holds settings (docs/plans.md): a dict
    such as {"rounds": 300, "probe.k": 50}, a preset, a file or a `baffle.Plan`. The run is kept in the folder `out`, by
    default a new one under runs/. With `overwrite` a run that is already there is removed once the new one has begun.
    The model that was given is not changed. Unlike elsewhere, sums are plain unless the plan sets "secure.mode" to
    "on", since this process has all data.

    The run hands back averaged weights, or the last ones if these are clearly better: on the pair `validation`, or
    without it on training samples. `run["returned"]` says which, and `test_…` are their metrics. In a private run
    without `validation` they are the averaged ones.

    With `seeds`, so many runs are made, with seeds that follow that of the plan; the model begins with its own weights
    in each. You get the first, whose `seeds` are all of them; `run.spread("test_accuracy")` gives mean and range, and
    its report shows them side by side.

    >>> run = baffle.fit(model, clients=[(x0, y0), (x1, y1), (x2, y2)], test=(x, y), plan={"rounds": 300})
    >>> run["test_accuracy"], run.metrics["loss"], run.model, run.predict(x)
    """
    wanted, data = _plan_of(plan), given_data(clients, test, validation)
    if data.shares is not None:
        _require_as_many(len(data.shares), wanted, plan)
    stop = _stop(callbacks)
    if seeds != 1:
        same: dict[str, Any] = {"validation": validation, "loss": loss, "metrics": metrics, "train": train}
        same |= {"callbacks": callbacks, "progress": progress, "overwrite": overwrite}
        return _over_seeds(seeds, plan, wanted, out, partial(fit, model, clients, test, **same))

    def loaded(wanted: Plan, folder: Path) -> tuple[Objects, Task]:
        given = _given(model, train, loss, data, folder, head=wanted.probe.head == "exact")
        try:
            objects = Objects(given, data, _metrics(metrics))
            return objects, objects.task(objects.settled(_with_step(wanted, given, plan)))
        except BaseException:  # the run has not begun, so leave no trace of this attempt
            given.forget()
            raise

    def warn(words: str) -> None:
        if data.test is not None or "is not measured" not in words:  # without test data, nobody expects measurements
            warnings.warn(words, stacklevel=_calls_inside())

    with ExitStack() as stack:
        path = Path(out) if out else stack.enter_context(new_folder(wanted.name))
        if overwrite:
            stack.enter_context(_moved_aside(path))
        folder = _new_folder(path)
        objects, task = _with_a_head_or_without(lambda wanted: loaded(wanted, folder.path), wanted, plan, say=progress)
        if progress:
            print(what_trains(objects.model))  # noqa: T201
        try:
            begin(folder, task, shown_progress() if progress else lambda _now: None, warn, stop)
        except BaseException:
            if not folder.plan.exists():  # the run has not begun, so leave no trace of this attempt
                objects.model.forget()
            raise
        return objects.handed_back(folder.path, say=progress)


def _with_a_head_or_without(load: Callable[[Plan], T], wanted: Plan, given: GivenPlan, *, say: bool = False) -> T:
    """What is loaded for a plan. The last layer of a model without a known one is probed, unless the given plan says
    itself how it is trained."""
    try:
        return load(wanted)
    except NoHeadError as fault:
        if isinstance(given, (str, Plan)) or "head" in _settings_in(given).get("probe", {}):
            raise
        if say:
            print(f"the last layer is probed like the others: {fault.found}")  # noqa: T201
        return load(_with_head(wanted, "probed"))


def _with_step(plan: Plan, model: GivenModel, given: GivenPlan) -> Plan:
    """The plan with a σ for activations that are rounded to integers, unless the given plan has one itself."""
    if not model.rounds or isinstance(given, (str, Plan)) or "sigma" in _settings_in(given).get("probe", {}):
        return plan
    return changed(plan, probe=changed(plan.probe, sigma=SIGMA_ROUNDED.get(plan.probe.supports, plan.probe.sigma)))


def _with_head(plan: Plan, head: Literal["probed", "exact"]) -> Plan:
    return changed(plan, probe=changed(plan.probe, head=head))


def _over_seeds(seeds: int, given: GivenPlan, wanted: Plan, out: str | Path | None, fit_one: Callable[..., Run]) -> Run:
    if seeds < 1:
        raise PlanError(f"seeds: expected how many runs to make, at least 1, got {seeds}")
    first = fit_one(plan=given, out=out)
    plan = _with_head(wanted, first.plan.probe.head)
    for seed in range(plan.seed + 1, plan.seed + seeds):
        folder = first.path.with_name(f"{first.path.name}-seed-{seed}")
        first.seeds += (fit_one(plan=changed(plan, seed=seed), out=folder),)
    return first


def resume(
    path: str | Path,
    settings: Settings = (),
    *,
    model: "nn.Module | str | Path | None" = None,
    clients: Any = None,
    test: Any = None,
    validation: Any = None,
    loss: str | Function = "cross_entropy",
    metrics: str | Function | Sequence[str | Function] = (),
    callbacks: Callback | Sequence[Callback] = (),
    data: str | Path | None = None,
    watch: Watch | None = None,
    own_code: bool = False,
) -> Run:
    """Continue a run. Settings such as {"rounds": 800} may change how long and how it runs, but nothing that determines
    its weights.

    A run of `baffle.fit` needs its objects again: `model`, `clients`, and those of `test`, `loss` and `metrics` that it
    was given. Another model, another loss or other data are refused. The model's own initial weights do not matter,
    because the run's folder has them. Functions that the plan in the folder names are called only with `own_code`: set
    it if the run is your own.

    >>> run = baffle.resume("runs/mine", {"rounds": 400}, model=model, clients=clients, test=test)
    """
    report, stop = watch or (lambda _now: None), _stop(callbacks)
    plan = load(str(RunFolder.existing(Path(path)).plan))
    require_own_code(plan, Path(path), own_code=own_code)
    if not plan.task.data.startswith(f"{GIVEN}:"):
        if model is not None or clients is not None:
            raise PlanError(f"{path} was not begun by baffle.fit, so its plan names model and data; give none")
        resume_simulation(path, settings, data=data, watch=report, stop=stop, own_code=own_code)
        return Run(path)
    if model is None or clients is None:
        raise PlanError(f"{path} was begun by baffle.fit; give its objects again: model=…, clients=…")
    objects = Objects(
        _given_again(model, loss, plan, Path(path)), given_data(clients, test, validation), _metrics(metrics)
    )
    objects.require_known(plan)
    resume_simulation(path, settings, watch=report, stop=stop, load_again=objects.task, own_code=own_code)
    return objects.handed_back(path, say=False)


@contextmanager
def objects_of(
    model: Any, clients: Any, loss: str | Function, train: str | Sequence[str], plan: GivenPlan
) -> "Iterator[tuple[Objects, Plan, Task]]":
    """The objects of a fit that is only tried, its plan and its task."""
    data = given_data(clients)

    def loaded(wanted: Plan) -> tuple[Objects, Plan, Task]:
        given = _given(model, train, loss, data, Path(scratch) / "run", head=wanted.probe.head == "exact")
        objects, wanted = Objects(given, data, ()), _with_step(wanted, given, plan)
        return objects, wanted, objects.task(objects.settled(wanted))

    wanted = _plan_of(plan)
    if data.shares is not None:
        _require_as_many(len(data.shares), wanted, plan)
    with TemporaryDirectory() as scratch:
        yield _with_a_head_or_without(loaded, wanted, plan)


@dataclass(frozen=True)
class Objects:
    """The objects that were given to a fit."""

    model: GivenModel
    data: GivenData
    metrics: tuple[str | Function, ...]

    def settled(self, wanted: Plan) -> Plan:
        """The wanted plan, with names that identify these objects when the run is resumed."""
        if wanted.task.validation:
            raise PlanError(
                "task.validation: baffle.fit tests on what it is given; leave it out, and give samples to choose on as "
                "test"
            )
        plan = with_names(wanted, self.model, self.metrics, self.data.fingerprint())
        if self.data.shares is not None:
            plan = changed(plan, federation=changed(plan.federation, clients=len(self.data.shares)))
        check(plan)
        self._require_labels(plan)
        self._source(plan).train  # noqa: B018  refuses unusable data before the model is tried on them
        return self.model.settled(plan, self.data.few())

    def task(self, plan: Plan) -> Task:
        """The task of a run with these objects."""
        source = self._source(plan)
        task = load_task(plan, share=self._share, source=source, model=self.model.on(plan))
        return replace(task, metrics=metrics_of(plan, source, given_metrics(self.metrics)))

    def trials(self, plan: Plan, keep: Callable[[list[I64]], list[I64]]) -> Task:
        """The task of trials that train on a part of each client's samples."""
        share, source = self._share, self._source(plan)
        return load_task(plan, share=lambda of, its: keep(share(of, its)), source=source, model=self.model.on(plan))

    def handed_back(self, path: str | Path, *, say: bool) -> Run:
        """The finished run, whose summary says whether it hands back the averaged weights or the last ones, and what
        these score on the test set."""
        run, judge = Run(path, self.model), self.data.validation or self.data.train
        plan, validated = run.plan, self.data.validation is not None
        if not plan.update.ema or (plan.privacy.on and not validated):  # a private run's samples tell nothing more
            return run
        model = self.model.on(plan)
        with model.one_thread_each():
            runtime, last = model.runtime(plan.probe, FLOAT32), run.weights(last=True)
            classes = plan.task.loss == "cross_entropy"
            error = partial(_share_of_errors, runtime) if classes else lambda weights, batch: runtime.on(batch)(weights)
            chosen, why = choose_weights(error, judge, run.weights(last=False), last)
            why = f"{'errors' if classes else 'loss'} {why.format('validation' if validated else 'training')}"
            measured = self._measured(plan, runtime, last) if chosen == LAST and self.data.test else {}
        with RunFolder.existing(run.path) as folder:
            folder.write_summary(folder.read_summary() | measured | {"returned": chosen, "returned_because": why})
        if say:
            print(f"{chosen} weights are handed back; {why}\nthe run is in {run.path}")  # noqa: T201
        return run

    def _measured(self, plan: Plan, runtime: Runtime, weights: F32) -> dict[str, Any]:
        source = self._source(plan)
        metrics, test = metrics_of(plan, source, given_metrics(self.metrics)), source.test
        return evaluate(metrics, runtime, weights, test.batch(np.arange(len(test))), source)

    def require_known(self, plan: Plan) -> None:
        """Refuse objects that are not those of the run with this plan."""
        if plan.task.data != f"{GIVEN}:{self.data.fingerprint()}":
            raise UnusableDataError("clients: these are not the run's data; give what the run was begun with")
        self.model.require_known(plan, self.data.few())

    def _require_labels(self, plan: Plan) -> None:
        """Refuse labels that do not suit the model, in words for users of `fit`, who have no source to correct."""
        if plan.task.loss not in LOSSES:
            return
        shape, classes = self.model.outputs(self.data.few().x).shape[1:], self._classes(plan)
        wanted = f"shape {shape[:-1]}, one for each position" if shape[:-1] else "one class number for each sample"
        sets = {"clients": self.data.train, "test": self.data.test, "validation": self.data.validation}
        for whose, y in {whose: data.labels for whose, data in sets.items() if data is not None}.items():
            fault = ""
            has = f"y has shape {y.shape[1:]} for each sample, but the model's outputs have {shape}: expected"
            if plan.task.loss != "cross_entropy":
                fault = f"{has} as many numbers" if prod(y.shape[1:]) != prod(shape) else ""
            elif y.dtype.kind not in "iu":
                fault = (
                    f"y is {y.dtype}, but the loss is cross_entropy: expected class numbers from 0, as integers; of "
                    'rows with a one for the class, y.argmax(1); for numbers to predict give loss="mse"'
                )
            elif y.shape[1:] not in (shape[:-1], shape[1:]):
                fault = f"{has} {wanted}"
            elif y.size and y.max() >= classes:
                fault = (
                    f"y has class {y.max()}, but the model has outputs for {classes}: expected class numbers from 0 to "
                    f"{classes - 1}; give the model more outputs, or correct the labels"
                )
            if fault:
                raise UnusableDataError(f"{whose}: {fault}")

    def _source(self, plan: Plan) -> Source:
        return Source(self.data.train, self.data.test, self._classes(plan), self.data.testers)

    def _share(self, plan: Plan, source: Source) -> list[I64]:
        return share_out(plan, source) if self.data.shares is None else self.data.shares

    def _classes(self, plan: Plan) -> int:
        """The number of classes that the model distinguishes; 0 if it predicts numbers."""
        few = self.data.few()
        if is_of_numbers(plan.task.loss) or (plan.task.loss != "cross_entropy" and few.y.dtype.kind != "i"):
            return 0
        shape = self.model.outputs(few.x).shape
        return shape[-1] if shape[:-1] == few.y.shape else shape[1] if len(shape) > 1 else 1


def _share_of_errors(runtime: Runtime, weights: F32, batch: Batch) -> float:
    return 1 - OF_CLASSES["accuracy"](runtime.outputs(weights, batch), batch.y)


def _calls_inside() -> int:
    """How many calls lie between the user's line, which a warning names, and the caller of this function."""
    inside, frame = str(Path(__file__).parents[1]), sys._getframe(1)
    for calls in count(1):
        if frame.f_back is None or not frame.f_code.co_filename.startswith(inside):
            return calls
        frame = frame.f_back
    raise AssertionError


def _plan_of(given: GivenPlan) -> Plan:
    """Convert a given plan."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, str):
        return load(given)
    if given is not None and not isinstance(given, (Mapping, list, tuple)):
        raise PlanError(
            f"plan: expected a preset's name, the path of a TOML file, a baffle.Plan or a dict of settings, got "
            f"{type(given).__name__}"
        )
    raw: dict[str, Any] = deepcopy(dict(DEFAULTS))
    lay_over(raw, given or {})
    return build(raw)


def _require_as_many(clients: int, plan: Plan, given: GivenPlan) -> None:
    """Refuse a plan that says another number of clients than have data. What it leaves at the default, it does not
    say."""
    said = plan.federation.clients
    named = "clients" in _settings_in(given).get("federation", {})
    if said == clients or (said == Plan().federation.clients and not named):
        return
    raise PlanError(
        f"federation.clients: the plan says {said}, but clients is a list with the data of {clients}; leave it out, or "
        "give one pair (x, y), which is shared out among them"
    )


def _settings_in(given: GivenPlan) -> dict[str, Any]:
    """The settings that were given as such. A preset, a file or a plan has none."""
    raw = dict[str, Any]()
    if given is not None and not isinstance(given, (str, Plan)):
        lay_over(raw, given)
    return raw


def _metrics(given: str | Function | Sequence[str | Function]) -> tuple[str | Function, ...]:
    """Metrics, of which one may be given alone."""
    metrics = (given,) if isinstance(given, str) or not isinstance(given, Sequence) else tuple(given)
    for metric in metrics:
        if not isinstance(metric, str) and not callable(metric):
            raise PlanError(f'metrics: expected names such as "accuracy", or functions, got {metric!r}')
    return metrics


def _given(
    model: Any, train: str | Sequence[str], loss: str | Function, data: GivenData, out: Path, *, head: bool
) -> GivenModel:
    """The model that was given: a module, or the path of an ONNX file or of an exported folder."""
    if not isinstance(model, (str, Path)):
        return GivenModule.of(model, train, loss)
    from baffle.fitting.given_onnx import GivenOnnx

    return GivenOnnx.of(Path(model), train, loss, model_folder(out), data.few(), head=head)


def _given_again(model: Any, loss: str | Function, plan: Plan, run: Path) -> GivenModel:
    """The model of a run that is resumed. A module gets the weights that the run began with."""
    if not isinstance(plan.task.model, Custom):
        from baffle.fitting.given_onnx import GivenOnnx

        if not isinstance(model, (str, Path)):
            raise PlanError(f"model: the run's model came as ONNX; expected its path again, got {type(model).__name__}")
        return GivenOnnx.again(Path(model), loss, plan)
    weights = initial_weights(RunFolder.existing(run).journal, plan)
    return GivenModule.of(model, plan.task.model.train, loss).starting_at(weights)


def _new_folder(path: Path) -> RunFolder:
    try:
        return RunFolder.new(path)
    except RunFolderError:
        if not (path / "plan.toml").exists():
            raise
        raise RunFolderError(
            f'out: {path} holds a run; go on with it by baffle.resume("{path}", …), replace it with overwrite=True, or '
            "give another folder"
        ) from None


@contextmanager
def _moved_aside(path: Path) -> Iterator[None]:
    """Make room for a run where there is one already. The old one comes back if the new one does not begin."""
    if not (path / PLAN).is_file():
        yield
        return
    with RunFolder.existing(path):  # no other process uses it
        moved = {at: at.with_name(f".{at.name}-{token_hex(4)}") for at in (path, model_folder(path)) if at.is_dir()}
        for at, aside in moved.items():
            at.rename(aside)
        try:
            yield
        finally:
            begun = (path / PLAN).is_file()
            for at, aside in moved.items():
                if not begun:
                    with suppress(OSError):  # an empty folder
                        at.rmdir()
                    aside.rename(at)
                elif not aside.is_symlink():
                    shutil.rmtree(aside)


def model_folder(run: Path) -> Path:
    """Where an ONNX file that a run trains is kept as a graph."""
    return run.with_name(f"{run.name}-model")


def _stop(given: Callback | Sequence[Callback]) -> Stop:
    callbacks = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for callback in callbacks:
        if not callable(callback):
            raise PlanError(f"callbacks: expected functions, got {callback!r}")

    def stop(played: Played) -> bool:
        now = {**played.metrics, "round": played.present.round}
        answers = [callback(now) for callback in callbacks]
        return any(answer is True for answer in answers)

    return stop
