"""A plan: everything that determines a run, frozen, read from TOML.

The sections `task`, `federation`, `probe`, `update` and `ring` with `seed`, `estimator` and the groups of `secure`
determine the weights; their digest names the trajectory. `rounds`, `run` and the rest of `secure` say how far and how a
run goes, and may change when it is resumed.
"""

import difflib
import importlib
import math
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import msgspec
from msgspec import Meta

from baffle.errors import PlanError
from baffle.secure.terms import Terms

Count = Annotated[int, Meta(ge=1)]
OptionalCount = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
NonNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Share = Annotated[float, Meta(gt=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]

Activation = Literal["hardswish", "relu", "relu6", "selu", "gelu"]
Norm = Literal["none", "group", "batch"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a plan; an unknown key in it is an error."""


class LeNet(Section, frozen=True, tag_field="name", tag="lenet"):
    """The paper's LeNet. `head`: average over positions, or flatten them."""

    channels: tuple[Count, Count] = (16, 64)
    head: Literal["average", "flatten"] = "average"
    activation: Activation = "hardswish"
    norm: Norm = "none"


class WRN(Section, frozen=True, tag_field="name", tag="wrn"):
    """A wide residual network of depth ten; with `widen = 2` the paper's WRN-10-2."""

    widen: Count = 2
    activation: Activation = "hardswish"
    norm: Norm = "group"


class MobileNet(Section, frozen=True, tag_field="name", tag="mobilenet"):
    """MobileNetV2 on pixels in [0, 1]. `weights`: trained on ImageNet, from a file, or random. `trained`: a new last
    layer behind a frozen front, or everything. ImageNet's weights were trained with relu6 and hold their BatchNorm."""

    weights: Literal["imagenet", "random"] = "imagenet"
    trained: Literal["head", "all"] = "head"
    activation: Activation = "relu6"
    norm: Norm = "none"


class Softmax(Section, frozen=True, tag_field="name", tag="softmax"):
    """Softmax regression: one linear layer."""


class Custom(Section, frozen=True, tag_field="name", tag="custom"):
    """A model of your own: `factory = "package.module:function"` gives an nn.Module."""

    factory: str


Model = LeNet | WRN | MobileNet | Softmax | Custom


class Task(Section, frozen=True):
    """`data` is a data set that BAFFLE knows, or "package.module:function" for one of your own. `pixels = 0`: the size
    that is usual for it. `augment`: training images are shifted and mirrored at random, where the set knows how to."""

    data: str = "digits"
    pixels: Annotated[int, Meta(ge=0, le=1024)] = 0
    augment: bool = False
    model: Model = LeNet(channels=(8, 16), head="flatten")


class Tier(Section, frozen=True):
    """Slower clients: a share of them evaluates only the first k directions."""

    k: Count
    share: Share


class Federation(Section, frozen=True):
    """Who takes part and how. A "dirichlet" partition has its `alpha` and gives each client `floor_samples` at least.
    `batch = 0`: a client probes on all its samples at once. `seeds = "own"`: at batch level every client draws its own
    directions and sends the gradient that it estimates. At epoch level a client goes through its samples `epochs`
    times, or takes so many `steps`. `dropout`: the chance that a simulated client does not answer in a round."""

    clients: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    participation: Share = 1.0
    partition: Literal["iid", "dirichlet", "domain", "writer"] = "iid"
    alpha: Positive = 0.3
    floor_samples: Count = 10
    level: Literal["batch", "epoch"] = "batch"
    seeds: Literal["shared", "own"] = "shared"
    batch: OptionalCount = 32
    epochs: Count = 1
    steps: OptionalCount = 0
    weighting: Literal["samples", "uniform"] = "samples"
    tiers: tuple[Tier, ...] = ()
    dropout: Decay = 0.0


class Probe(Section, frozen=True):
    """The estimator's settings. `precision` is that of the forward passes: the moved weights are rounded to it.
    `micro_batch = 0` and an empty `layout` are chosen when the run starts and written into its own plan. Probes take at
    most `memory_mb` beside the model and the batch (0: what they take), because micro-batches are made small enough. A
    layout says how many directions each support has: start, stop, start and stop of its tail, count."""

    k: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    sigma: Positive = 1e-3
    scheme: Literal["forward", "central"] = "forward"
    distribution: Literal["gaussian", "rademacher", "sphere"] = "gaussian"
    micro_batch: OptionalCount = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    memory_mb: OptionalCount = 0
    supports: Literal["dense", "stages", "units"] = "dense"
    layout: tuple[tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount, Count], ...] = ()


class Update(Section, frozen=True):
    """The optimizer's settings. `clip = 0` and `ema = 0` turn these off. A round that would move the weights further
    than `norm_max` (0: however far) is refused."""

    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    rate: Positive = 0.01
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    momentum: Decay = 0.9
    weight_decay: NonNegative = 0.0
    clip: NonNegative = 0.0
    ema: Decay = 0.995
    norm_max: NonNegative = 0.0


class Bounds(Section, frozen=True):
    """What the ring must hold. `n_max = 0`: the largest client's number of samples."""

    d_max: Positive = 100.0
    update_max: Positive = 4.0
    n_max: OptionalCount = 0


class Secure(Section, frozen=True):
    """The secure sum. A sum is over `floor` clients at least; `threshold = 0`: the least safe one. With `groups` the
    clients of a round are divided into so many sums, which `combine` puts together; `group_seeds = "own"` gives each
    group directions of its own. The groups, unlike the rest of this section, determine the weights."""

    mode: Literal["on", "malicious-server", "off"] = "on"
    floor: Annotated[int, Meta(ge=2)] = 3
    threshold: OptionalCount = 0
    groups: Count = 1
    group_seeds: Literal["shared", "own"] = "shared"
    combine: Literal["mean", "median"] = "mean"


class Run(Section, frozen=True):
    """How a run is carried out; none of it is part of the trajectory. `workers = 0`: a thread per core. Features of a
    frozen backbone are kept in memory up to `features_mb`, and in a temporary file beyond. In a network, a client that
    has not answered after `deadline_seconds` is not waited for."""

    downlink: Literal["scalars", "delta", "weights"] = "scalars"
    workers: OptionalCount = 0
    device: str = "cpu"
    evaluate_every: Count = 20
    snapshot_every: Count = 100
    commit_seconds: NonNegative = 1.0
    features_mb: OptionalCount = 1024
    deadline_seconds: Positive = 60.0


class Plan(Section, frozen=True):
    name: str = "run"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    rounds: Count = 400
    estimator: Literal["probe", "backprop"] = "probe"
    task: Task = Task()
    federation: Federation = Federation()
    probe: Probe = Probe()
    update: Update = Update()
    ring: Bounds = Bounds()
    secure: Secure = Secure()
    run: Run = Run()

    @property
    def per_round(self) -> int:
        """How many clients take part in a round."""
        return max(1, round(self.federation.clients * self.federation.participation))

    @property
    def group_sizes(self) -> tuple[int, int]:
        """The smallest and the largest number of clients that are summed together."""
        return self.per_round // self.secure.groups, -(-self.per_round // self.secure.groups)

    @property
    def own_seeds(self) -> bool:
        """Whether every group has directions of its own."""
        return self.secure.group_seeds == "own" and self.outcome_kind == "scalars"

    @property
    def outcome_kind(self) -> Literal["scalars", "vector"]:
        """Scalars where the server rebuilds the gradient; a vector where clients send weight changes or gradients."""
        shared = self.federation.level == "batch" and self.federation.seeds == "shared"
        return "scalars" if self.estimator == "probe" and shared else "vector"

    def trajectory_digest(self) -> bytes:
        """Names what determines the weights."""
        said, secure = _said(self), _said(self.secure)
        parts = ("seed", "estimator", "task", "federation", "probe", "update", "ring")
        groups = ("groups", "group_seeds", "combine")
        determines = {part: said[part] for part in parts if part in said}
        determines["secure"] = {name: secure[name] for name in groups if name in secure}
        return _digest("baffle/trajectory/2", determines)

    def model_digest(self) -> bytes:
        """Names the model, whatever else is done with it."""
        return _digest("baffle/model/1", _said(self.task.model))

    def digest(self) -> bytes:
        return _digest("baffle/plan/2", _said(self))

    def to_toml(self) -> str:
        return msgspec.toml.encode(self).decode()


def presets() -> list[str]:
    return sorted(
        entry.name.removesuffix(".toml") for entry in _preset_folder().iterdir() if entry.name.endswith(".toml")
    )


def load(source: str = "digits", settings: Iterable[str] = ()) -> Plan:
    """A plan from a TOML file or a preset's name, with dotted settings such as "probe.k=50" laid over it."""
    if source in presets():
        text = (_preset_folder() / f"{source}.toml").read_text()
    else:
        path = Path(source)
        if path.suffix != ".toml":
            raise PlanError(
                f"no plan is called {source!r}{_nearest(source, presets())}; "
                f"name a .toml file or one of: {', '.join(presets())}"
            )
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as fault:
            raise PlanError(f"the plan {source} cannot be read: {fault}") from None
    return parse(text, settings, source)


def parse(text: str, settings: Iterable[str] = (), source: str = "plan") -> Plan:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise PlanError(f"{source} is not valid TOML: {fault}") from None
    for setting in settings:
        _lay_over(raw, setting)
    return build(raw)


def change(plan: Plan, settings: Iterable[str]) -> Plan:
    """The plan with dotted settings laid over it."""
    return parse(plan.to_toml(), settings)


def build(raw: Mapping[str, Any]) -> Plan:
    """A validated plan from plain tables."""
    _refuse_unknown_keys(raw, Plan, "")
    try:
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as fault:
        raise PlanError(_explain(str(fault), raw)) from None
    _check_model(plan.task.model)
    _check_seeds(plan)
    _check_steps(plan.federation)
    _check_tiers(plan)
    _check_probe(plan)
    _check_secure(plan)
    return plan


def _check_model(model: Model) -> None:
    if not isinstance(model, MobileNet) or model.weights != "imagenet":
        return
    if (model.activation, model.norm) != ("relu6", "none"):
        raise PlanError(
            'task.model: ImageNet\'s weights need activation = "relu6" and norm = "none", got '
            f'{model.activation!r} and {model.norm!r}; leave these out, or set weights = "random"'
        )


def _check_seeds(plan: Plan) -> None:
    if plan.federation.seeds == "shared":
        return
    remedy = 'leave federation.seeds out, or set it to "shared"'
    if plan.estimator == "backprop":
        raise PlanError(f'federation.seeds = "own" needs estimator = "probe", got "backprop", which has none; {remedy}')
    if plan.federation.level == "epoch":
        raise PlanError(
            f'federation.seeds = "own" needs level = "batch", got "epoch", where clients have their own; {remedy}'
        )
    if plan.secure.group_seeds == "own":
        raise PlanError(
            'federation.seeds = "own" leaves groups no directions to share: expected secure.group_seeds = "shared", '
            'got "own"; leave one of them out'
        )


def _check_steps(federation: Federation) -> None:
    if not federation.steps:
        return
    if federation.level == "batch":
        raise PlanError(
            f'federation.steps are local ones and need level = "epoch", got "batch" with steps = {federation.steps}; '
            "leave them out"
        )
    if federation.epochs != 1:
        raise PlanError(
            f"federation.steps = {federation.steps} and federation.epochs = {federation.epochs} both say how long a "
            "client trains; leave one of them out"
        )


def _check_secure(plan: Plan) -> None:
    smallest, largest = plan.group_sizes
    if smallest < 1:
        raise PlanError(f"secure.groups: {plan.secure.groups} groups of {plan.per_round} clients a round")
    if plan.secure.mode == "off":
        return
    if smallest < plan.secure.floor:
        raise PlanError(
            f"secure.floor: a secure sum is over {plan.secure.floor} clients at least, here are {smallest} in one; "
            'have fewer secure.groups or more federation.participation, or set secure.mode = "off" and show each '
            "client to the server"
        )
    if not plan.secure.threshold:
        return
    terms = Terms(agreement=plan.secure.mode == "malicious-server")
    few, many = (terms.graph(tuple(range(size)), bytes(32)) for size in (smallest, largest))
    least, most = terms.least_threshold(many, largest), few.k + 1
    if not least <= plan.secure.threshold <= most:
        raise PlanError(
            f"secure.threshold: expected {least} to {most}, or 0 for the least of these, with {largest} clients in a "
            f"sum, got {plan.secure.threshold}"
        )


def imported(name: str) -> Callable[..., Any]:
    """The function that "package.module:function" names."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as fault:
        raise PlanError(f"{name} cannot be imported: {fault}") from None
    if not callable(found):
        raise PlanError(f"{name} must be a function, got {type(found).__name__}")
    return cast(Callable[..., Any], found)


def _check_probe(plan: Plan) -> None:
    probe = plan.probe
    if probe.precision != "float32" and probe.supports != "dense":
        raise PlanError(
            f'probe.precision: only dense directions can be probed in {probe.precision}; set probe.supports = "dense", '
            'or probe.precision = "float32"'
        )
    if not probe.layout:
        return
    if probe.supports == "dense":
        raise PlanError('probe.layout: dense directions have none; leave it out, or set probe.supports = "units"')
    if sum(row[-1] for row in probe.layout) != probe.k:
        raise PlanError(f"probe.layout: its counts must add up to probe.k = {probe.k}")
    if not all(start < stop and first <= last for start, stop, first, last, _ in probe.layout):
        raise PlanError("probe.layout: every row must be [start, stop, start and stop of its tail or 0, 0, count]")


def _check_tiers(plan: Plan) -> None:
    tiers = plan.federation.tiers
    if tiers and plan.outcome_kind != "scalars":
        raise PlanError(
            'federation.tiers need level = "batch", seeds = "shared" and estimator = "probe": only scalars can be fewer'
        )
    for tier in tiers:
        if tier.k >= plan.probe.k:
            raise PlanError(f"federation.tiers: a tier's k must be below probe.k = {plan.probe.k}, got {tier.k}")
    shares = math.fsum(tier.share for tier in tiers)
    if shares > 1 + 1e-9:
        raise PlanError(f"federation.tiers: shares must add up to at most 1, got {shares:g}")


def _lay_over(raw: dict[str, Any], setting: str) -> None:
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        raise PlanError(f"a setting has the form section.key=value, got {setting!r}")
    *tables, key = path.strip().split(".")
    table = raw
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise PlanError(f"{path.strip()}: {name} is a value, not a table; expected section.key=value")
    try:
        table[key] = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        table[key] = text.strip()


def _refuse_unknown_keys(raw: Mapping[str, Any], struct: type[Section], path: str) -> None:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    allowed = [*fields, *([struct.__struct_config__.tag_field] if struct.__struct_config__.tag_field else [])]
    for key, value in raw.items():
        if key not in allowed:
            known = ", ".join(allowed)
            raise PlanError(f"unknown key {path}{key}{_nearest(key, allowed, path)}; known here: {known}")
        tables = value if isinstance(value, list) else [value]
        for table in tables:
            if isinstance(table, Mapping) and (inner := _struct_for(fields.get(key), table)):
                _refuse_unknown_keys(table, inner, f"{path}{key}.")


def _struct_for(kind: Any, value: Mapping[str, Any]) -> Any:
    """The struct that a table of a plan becomes, or none where the table is no struct."""
    if kind == Model:
        return {struct.__struct_config__.tag: struct for struct in get_args(Model)}.get(value.get("name"))
    kind = get_args(kind)[0] if get_args(kind) else kind
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _explain(fault: str, raw: Mapping[str, Any]) -> str:
    """Turn msgspec's "Expected `int` >= 1 - at `$.probe.k`" into a line that names key, value and choices."""
    expected, _, place = fault.replace("`", "").partition(" - at $")
    keys = [key for key in place.replace("[", ".").replace("]", "").split(".") if key]
    value: Any = raw
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, Mapping) else None
    if expected.startswith("Invalid") and (choices := _choices(keys, raw)):
        expected = f"expected one of {', '.join(map(repr, choices))}"
    wanted = expected.partition(", got ")[0]
    return f"{'.'.join(keys) or 'plan'}: {wanted[:1].lower()}{wanted[1:]}, got {value!r}"


def _choices(keys: list[str], raw: Mapping[str, Any]) -> tuple[Any, ...]:
    """What may stand at a place of a plan that takes one of a few words."""
    kind: Any = Plan
    for key in keys:
        if kind == Model:
            if key == "name":
                return tuple(struct.__struct_config__.tag for struct in get_args(Model))
            kind = _struct_for(kind, raw["task"]["model"])
        fields = (
            {field.encode_name: field.type for field in msgspec.structs.fields(kind)} if isinstance(kind, type) else {}
        )
        kind = fields.get(key)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _nearest(word: str, known: Iterable[str], path: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {path}{close[0]}?)" if close else ""


def _said(value: Any) -> Any:
    """What a section says beyond its defaults, so that a setting added later changes no older plan's digest."""
    if isinstance(value, (tuple, list)):
        return [_said(one) for one in value]
    if not isinstance(value, Section):
        return value
    settings = {field.encode_name: getattr(value, field.name) for field in _unlike_default(value)}
    config = value.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    return tag | {name: _said(setting) for name, setting in settings.items()}


def _unlike_default(section: Section) -> list[msgspec.structs.FieldInfo]:
    return [one for one in msgspec.structs.fields(section) if getattr(section, one.name) != one.default]


def _digest(tag: str, value: Any) -> bytes:
    return sha256(tag.encode() + b"\0" + msgspec.json.encode(value, order="sorted")).digest()


def _preset_folder() -> Any:
    return resources.files("baffle") / "plans"
