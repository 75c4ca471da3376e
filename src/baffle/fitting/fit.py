"""`baffle.fit`: train a model of your own on data of your own, with forward passes alone, in one call."""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as changed

from baffle.core.arrays import I64
from baffle.data.partition import share_out
from baffle.data.sources import Source
from baffle.errors import NoHeadError, PlanError, RunFolderError, UnusableDataError
from baffle.fitting.given_data import GivenData, given_data
from baffle.fitting.given_model import Function, GivenModel, GivenModule, given_metrics, with_names
from baffle.fitting.run import Run
from baffle.journal.folder import RunFolder, new_folder
from baffle.journal.replay import initial_weights
from baffle.plan import Custom, Plan, build, check, load
from baffle.plan.functions import GIVEN, require_own_code
from baffle.plan.tasks import LOSSES, is_of_numbers
from baffle.report.words import is_share
from baffle.server.recorder import Progress, Watch
from baffle.server.round import Played
from baffle.simulation import Stop, begin
from baffle.simulation import resume as resume_simulation
from baffle.task.load import Task, load_task
from baffle.task.metrics import metrics_of

if TYPE_CHECKING:
    from torch import nn

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

GivenPlan = str | Plan | Mapping[str, Any] | None
"""A preset's name or a TOML file, a plan, or settings such as {"rounds": 300, "probe.k": 50}."""

Callback = Callable[[Mapping[str, Any]], object]
"""Called after every round with what it measured: `round` (counted from 1), `loss`, and `test_…` where the model was
evaluated. If it returns True, the run ends with that round; it can be resumed."""


def fit(
    model: "nn.Module | str | Path",
    clients: Any,
    test: Any = None,
    *,
    loss: str | Function = "cross_entropy",
    metrics: Sequence[str | Function] = (),
    train: str | Sequence[str] = "all",
    plan: GivenPlan = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> Run:
    """Train a model on the data of simulated clients, which only run it forward.

    `model` is any `nn.Module`, or the path of an ONNX file. `clients` is a list with the data of each client, or one
    data set that is shared out as the plan says (among ten clients, at random). Data are pairs (x, y) of arrays or
    tensors, or map-style data sets of such pairs; x may be a tuple or a dict, which the model takes as its arguments.
    `loss` is "cross_entropy", "mse", "mae", "bce" or any function of outputs and targets, with or without a derivative;
    `metrics` are names such as "accuracy" and "r2", or functions of outputs and targets as NumPy arrays. `train`
    chooses what is trained: "all", the "last" layer, or names of parameters by pattern. `plan` holds settings
    (docs/plans.md): a dict such as {"rounds": 300, "probe.k": 50}, a preset, a file or a `baffle.Plan`. The run is kept
    in the folder `out`, by default a new one under runs/. The model that was given is not changed.

    >>> run = baffle.fit(model, clients=[(x0, y0), (x1, y1), (x2, y2)], test=(x, y), plan={"rounds": 300})
    >>> run["test_accuracy"], run.metrics["loss"], run.model, run.predict(x)
    """
    wanted, data = _plan_of(plan), given_data(clients, test)
    stop = _stop(callbacks)
    folder = _new_folder(Path(out) if out else new_folder(wanted.name))

    def loaded(wanted: Plan) -> tuple[_Objects, Task]:
        given = _given(model, train, loss, data, folder.path, head=wanted.probe.head == "exact")
        try:
            objects = _Objects(given, data, tuple(metrics))
            return objects, objects.task(objects.settled(wanted))
        except BaseException:  # the run has not begun, so leave no trace of this attempt
            given.forget()
            raise

    def warn(words: str) -> None:
        if data.test is not None or "is not measured" not in words:  # without test data, nobody expects measurements
            warnings.warn(words, stacklevel=5)

    try:
        objects, task = loaded(wanted)
    except NoHeadError:
        if _names_head(plan):
            raise
        objects, task = loaded(changed(wanted, probe=changed(wanted.probe, head="probed")))
    try:
        begin(folder, task, _progress() if progress else lambda _now: None, warn, stop)
    except BaseException:
        if not folder.plan.exists():  # the run has not begun, so leave no trace of this attempt
            objects.model.forget()
        raise
    return Run(folder.path, objects.model)


def resume(
    path: str | Path,
    settings: Iterable[str] = (),
    *,
    model: "nn.Module | str | Path | None" = None,
    clients: Any = None,
    test: Any = None,
    loss: str | Function = "cross_entropy",
    metrics: Sequence[str | Function] = (),
    callbacks: Sequence[Callback] = (),
    data: str | Path | None = None,
    watch: Watch | None = None,
    own_code: bool = False,
) -> Run:
    """Continue a run. Settings such as "rounds=800" may change how long and how it runs, but nothing that determines
    its weights.

    A run of `baffle.fit` needs its objects again: `model`, `clients`, and those of `test`, `loss` and `metrics` that it
    was given. Another model, another loss or other data are refused. The model's own initial weights do not matter,
    because the run's folder has them. Functions that the plan in the folder names are called only with `own_code`: set
    it if the run is your own.

    >>> run = baffle.resume("runs/mine", ["rounds=400"], model=model, clients=clients, test=test)
    """
    if isinstance(settings, str):
        raise PlanError(f"settings: expected a list of them, as [{settings!r}], got one text")
    report, stop = watch or (lambda _now: None), _stop(callbacks)
    plan = load(str(RunFolder.existing(Path(path)).plan))
    require_own_code(plan.task, Path(path), own_code=own_code)
    if not plan.task.data.startswith(f"{GIVEN}:"):
        if model is not None or clients is not None:
            raise PlanError(f"{path} was not begun by baffle.fit, so its plan names model and data; give none")
        resume_simulation(path, settings, data=data, watch=report, stop=stop, own_code=own_code)
        return Run(path)
    if model is None or clients is None:
        raise PlanError(f"{path} was begun by baffle.fit; give its objects again: model=…, clients=…")
    objects = _Objects(_given_again(model, loss, plan, Path(path)), given_data(clients, test), tuple(metrics))
    objects.require_known(plan)
    resume_simulation(path, settings, watch=report, stop=stop, load_again=objects.task, own_code=own_code)
    return Run(path, objects.model)


@dataclass(frozen=True)
class _Objects:
    """The objects that were given to a fit."""

    model: GivenModel
    data: GivenData
    metrics: tuple[str | Function, ...]

    def settled(self, wanted: Plan) -> Plan:
        """The wanted plan, with names that identify these objects when the run is resumed."""
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
        sets = {"clients": self.data.train, **({"test": self.data.test} if self.data.test else {})}
        for whose, y in {whose: data.labels for whose, data in sets.items()}.items():
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
        return Source(self.data.train, self.data.test, self._classes(plan))

    def _share(self, plan: Plan, source: Source) -> list[I64]:
        return share_out(plan, source) if self.data.shares is None else self.data.shares

    def _classes(self, plan: Plan) -> int:
        """The number of classes that the model distinguishes; 0 if it predicts numbers."""
        few = self.data.few()
        if is_of_numbers(plan.task.loss) or (plan.task.loss != "cross_entropy" and few.y.dtype.kind != "i"):
            return 0
        shape = self.model.outputs(few.x).shape
        return shape[-1] if shape[:-1] == few.y.shape else shape[1] if len(shape) > 1 else 1


def _plan_of(given: GivenPlan) -> Plan:
    """Convert a given plan."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, str):
        return load(given)
    if given is not None and not isinstance(given, Mapping):
        raise PlanError(
            f"plan: expected a preset's name, the path of a TOML file, a baffle.Plan or a dict of settings, got "
            f"{type(given).__name__}"
        )
    raw: dict[str, Any] = deepcopy(dict(DEFAULTS))
    _lay_over(raw, given or {})
    return build(raw)


def _names_head(given: GivenPlan) -> bool:
    """Whether a given plan says itself how the last layer is trained."""
    if given is None or not isinstance(given, Mapping):
        return given is not None
    return "probe.head" in given or "head" in given.get("probe", {})


def _lay_over(raw: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Write settings, nested or with dotted names, over those in `raw`."""
    for path, value in settings.items():
        *tables, key = str(path).split(".")
        table = raw
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise PlanError(f"plan: {path}: {name} is a value, not a table")
        if isinstance(value, Mapping) and isinstance(table.get(key), dict):
            _lay_over(table[key], value)
        else:
            table[key] = list(value) if isinstance(value, tuple) else value


def _given(
    model: Any, train: str | Sequence[str], loss: str | Function, data: GivenData, out: Path, *, head: bool
) -> GivenModel:
    """The model that was given: a module, or the path of an ONNX file or of an exported folder."""
    if not isinstance(model, (str, Path)):
        return GivenModule.of(model, train, loss)
    from baffle.fitting.given_onnx import GivenOnnx

    return GivenOnnx.of(Path(model), train, loss, out.with_name(f"{out.name}-model"), data.few(), head=head)


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
            f'out: {path} holds a run; go on with it by baffle.resume("{path}", …), or give another folder'
        ) from None


def _stop(callbacks: Sequence[Callback]) -> Stop:
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise PlanError(f"callbacks: expected a list of functions, got {type(callbacks).__name__}")

    def stop(played: Played) -> bool:
        now = {**played.metrics, "round": played.present.round}
        answers = [callback(now) for callback in callbacks]
        return any(answer is True for answer in answers)

    return stop


def _progress() -> Watch:
    """Writes a line whenever the model has been evaluated."""
    last = ""

    def watch(now: Progress) -> None:
        nonlocal last
        if now.value is None or now.rounds_done != int(now.rounds_done):
            return
        value = f"{now.value:.1%}" if is_share(now.metric) else f"{now.value:.4g}"
        if value == last and now.rounds_done != now.rounds:
            return
        last = value
        loss = "loss –" if now.loss is None else f"loss {now.loss:.4g}"
        course = loss if now.epsilon is None else f"ε {now.epsilon:.3g}"
        sys.stdout.write(f"round {int(now.rounds_done):4}/{now.rounds}  {course}  test {now.metric} {value}\n")
        sys.stdout.flush()

    return watch
