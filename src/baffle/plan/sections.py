"""The sections of a plan, frozen, and the digests that name it.

The sections `task`, `federation`, `probe`, `update` and `ring` with `seed`, `estimator` and the groups of `secure`
determine the weights; their digest names the trajectory. `rounds`, `run` and the rest of `secure` say how far and how a
run goes, and may change when it is resumed.
"""

import sys
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

LARGEST = 2**63 - 1
"""TOML, SQLite and the messages between client and server have no larger integers."""

Count = Annotated[int, Meta(ge=1, le=LARGEST)]
OptionalCount = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
NonNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Proportion = Annotated[float, Meta(gt=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]

TensorShape = Annotated[tuple[Count, ...], Meta(max_length=64)]

Activation = Literal["hardswish", "relu", "relu6", "selu", "gelu"]
Norm = Literal["none", "group", "batch"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a plan; an unknown key in it is an error."""


class ModelSettings(Section, frozen=True):
    """A model that a plan can name, and the settings that are empty until a run starts and fills them in. `runtime`:
    the only one that runs it (see runtime/registry.py). `has_graph`: BAFFLE can make its ONNX graph without PyTorch."""

    runtime: ClassVar[str] = ""
    has_graph: ClassVar[bool] = False
    filled_in: ClassVar[tuple[str, ...]] = ()

    def unsettled(self) -> list[str]:
        """The settings that no run has filled in yet."""
        return [name for name in self.filled_in if not getattr(self, name)]


class LeNet(ModelSettings, frozen=True, tag_field="name", tag="lenet"):
    """The paper's LeNet. `head`: average over positions, or flatten them."""

    has_graph: ClassVar[bool] = True

    channels: tuple[Count, Count] = (16, 64)
    head: Literal["average", "flatten"] = "average"
    activation: Activation = "hardswish"
    norm: Norm = "none"


class WRN(ModelSettings, frozen=True, tag_field="name", tag="wrn"):
    """A wide residual network of depth ten; with `widen = 2` the paper's WRN-10-2."""

    has_graph: ClassVar[bool] = True

    widen: Count = 2
    activation: Activation = "hardswish"
    norm: Norm = "group"


class MobileNet(ModelSettings, frozen=True, tag_field="name", tag="mobilenet"):
    """MobileNetV2. `weights`: trained on ImageNet, from a file, or random. `trained`: a new last layer behind a frozen
    front, or everything. ImageNet's weights were trained with relu6 and hold their BatchNorm. `scaling` is filled in
    when a run starts. Runs of version 0.1 have none: they scaled the pixels of most data sets twice."""

    filled_in: ClassVar[tuple[str, ...]] = ("scaling",)

    weights: Literal["imagenet", "random"] = "imagenet"
    trained: Literal["head", "all"] = "head"
    activation: Activation = "relu6"
    norm: Norm = "none"
    scaling: Literal["", "once"] = ""


class Softmax(ModelSettings, frozen=True, tag_field="name", tag="softmax"):
    """Softmax regression: one linear layer."""

    has_graph: ClassVar[bool] = True


class Custom(ModelSettings, frozen=True, tag_field="name", tag="custom"):
    """Your own model: `factory = "package.module:function"` returns an nn.Module. `train` are patterns of names of the
    parameters that are trained, or "last" for the last layer; without any, all that are not frozen. A module that was
    given to `baffle.fit` as an object is known again by `weights`, the SHA-256 of its initial weights, and by what it
    `says` about a few samples."""

    factory: str
    train: tuple[str, ...] = ()
    weights: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    says: tuple[float, ...] = ()


class Onnx(ModelSettings, frozen=True, tag_field="name", tag="onnx"):
    """A model that came as ONNX, in the folder `run.model` that `baffle export --onnx` made. `graph`, the SHA-256 of
    its graph, is filled in when the run starts."""

    runtime: ClassVar[str] = "onnx"
    filled_in: ClassVar[tuple[str, ...]] = ("graph",)

    graph: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""


Model = LeNet | WRN | MobileNet | Softmax | Custom | Onnx


class TaskSettings(Section, frozen=True):
    """`data` is a data set that BAFFLE knows, or "package.module:function" for your own. `pixels = 0`: its usual
    image size. `augment`: training images are shifted and mirrored at random, if the data set supports it. `init`: the
    initial weights of BAFFLE's own models are drawn by NumPy and are the same on every runtime; left out, by PyTorch.
    Other models bring their own. `loss` and `metrics` are names that BAFFLE knows (see plan/tasks.py), or
    "package.module:function" for your own. Without `metrics`, those are taken that suit the loss; they determine no
    weights."""

    data: str = "digits"
    pixels: Annotated[int, Meta(ge=0, le=1024)] = 0
    augment: bool = False
    loss: str = "cross_entropy"
    metrics: tuple[str, ...] = ()
    init: Literal["", "numpy"] = ""
    model: Model = LeNet(channels=(8, 16), head="flatten")

    @property
    def draws_weights(self) -> bool:
        """Whether initial weights are drawn without PyTorch."""
        return self.init == "numpy" and self.model.has_graph


class Tier(Section, frozen=True):
    """Slower clients: this share of all clients evaluates only the first k directions."""

    k: Count
    share: Proportion


class FederationSettings(Section, frozen=True):
    """Who takes part and how. A "dirichlet" partition uses `alpha` and gives each client at least `floor_samples`.
    `batch = 0`: a client probes on all its samples at once. `seeds = "own"`: at batch level every client draws its own
    directions and sends the gradient that it estimates. At epoch level a client goes through its samples `epochs`
    times, or takes `steps` steps. `dropout`: the chance that a simulated client does not answer in a round."""

    clients: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    participation: Proportion = 1.0
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


class ProbeSettings(Section, frozen=True):
    """The estimator's settings. `precision` is that of the forward passes: the moved weights are rounded to it.
    `micro_batch = 0` and an empty `layout` are chosen when the run starts and written into its own plan. Probes take at
    most `memory_mb` beside the model and the batch (0: no limit): micro-batches are made small enough. A layout's row
    gives a support and its number of directions: start, stop, start and stop of its tail, count. `shapes` are those of
    the model's trained tensors, which outer directions need; they are filled in when the run starts. So many outer
    directions go through the model `together` (0: chosen when the run starts; 1: each takes a pass of its own). A
    simulation's clients may have their samples `stacked`: they go through the model together."""

    k: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    sigma: Positive = 1e-3
    scheme: Literal["forward", "central"] = "forward"
    distribution: str = "gaussian"
    micro_batch: OptionalCount = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    memory_mb: OptionalCount = 0
    supports: Literal["dense", "layers", "stages", "units", "auto"] = "dense"
    layout: tuple[tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount, Count], ...] = ()
    shapes: tuple[TensorShape, ...] = ()
    together: OptionalCount = 0
    stacked: bool = False

    @property
    def moves_whole_models(self) -> bool:
        """Whether a probe is a forward pass of the whole model, which any runtime can run."""
        return self.supports in ("dense", "layers", "auto")


class UpdateSettings(Section, frozen=True):
    """The optimizer's settings. `clip = 0` and `ema = 0` turn these off. A round that would move the weights further
    than `norm_max` is refused (0: no limit). `moments`: adam has a second moment for each weight, or one for each
    layer. `layers` are then filled in when the run starts: start, stop, start and stop of the tail of each."""

    optimizer: str = "adam"
    moments: Literal["weights", "layers"] = "weights"
    layers: tuple[tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount], ...] = ()
    rate: Positive = 0.01
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    momentum: Decay = 0.9
    weight_decay: NonNegative = 0.0
    clip: NonNegative = 0.0
    ema: Decay = 0.995
    norm_max: NonNegative = 0.0


class RingSettings(Section, frozen=True):
    """Bounds on the values in the ring. `n_max = 0`: the largest client's number of samples."""

    d_max: Positive = 100.0
    update_max: Positive = 4.0
    n_max: OptionalCount = 0


class SecureSettings(Section, frozen=True):
    """The secure sum. A sum is over at least `floor` clients. `threshold = 0`: the lowest safe one. The clients of a
    round are divided into `groups` sums, which `combine` puts together; `group_seeds = "own"` gives each group its own
    directions. The settings of groups, unlike the rest of this section, determine the weights."""

    mode: Literal["on", "malicious-server", "off"] = "on"
    floor: Annotated[int, Meta(ge=2, le=LARGEST)] = 3
    threshold: OptionalCount = 0
    groups: Count = 1
    group_seeds: Literal["shared", "own"] = "shared"
    combine: Literal["mean", "median"] = "mean"


class RunSettings(Section, frozen=True):
    """How a run is executed. None of it affects the trajectory. `model` is the folder of a model that came as ONNX.
    `runtime` computes forward passes; left out, ONNX Runtime does if it is installed and can, else PyTorch.
    `workers = 0`: a thread per core. Features of a frozen backbone are kept in memory up to `features_mb`, and in a
    temporary file beyond. In a network, a client that has not answered after `deadline_seconds` is not waited for."""

    model: str = ""
    runtime: Literal["", "onnx", "torch"] = ""
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
    seed: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    rounds: Count = 400
    estimator: Literal["probe", "backprop"] = "probe"
    task: TaskSettings = TaskSettings()
    federation: FederationSettings = FederationSettings()
    probe: ProbeSettings = ProbeSettings()
    update: UpdateSettings = UpdateSettings()
    ring: RingSettings = RingSettings()
    secure: SecureSettings = SecureSettings()
    run: RunSettings = RunSettings()

    @property
    def per_round(self) -> int:
        """How many clients take part in a round."""
        return max(1, round(self.federation.clients * self.federation.participation))

    def needs_torch(self) -> str:
        """The first setting that only PyTorch can follow; empty if ONNX Runtime can run the plan, too."""
        task, probe = self.task, self.probe
        settings = (
            ("task.model.name", not task.model.runtime and not task.model.has_graph),
            ("task.init", not task.model.runtime and not task.draws_weights),
            ("estimator", self.estimator != "probe"),
            ("probe.supports", not probe.moves_whole_models),
            ("probe.precision", probe.precision != "float32"),
            ("probe.memory_mb", probe.memory_mb > 0),
            ("run.device", self.run.device != "cpu"),
        )
        return next((name for name, needed in settings if needed), "")

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
        """Identifies everything that determines the weights."""
        plan = _changed_settings(self)
        secure = _changed_settings(self.secure)
        parts = ("seed", "estimator", "task", "federation", "probe", "update", "ring")
        groups = ("groups", "group_seeds", "combine")
        determines = {part: plan[part] for part in parts if part in plan}
        if measured := determines.get("task", {}).keys() & {"metrics"}:  # they are taken beside the chain
            determines["task"] = {name: value for name, value in plan["task"].items() if name not in measured}
        determines["secure"] = {name: secure[name] for name in groups if name in secure}
        return _digest("baffle/trajectory/2", determines)

    def model_digest(self) -> bytes:
        """Identifies the model, independently of the rest of the plan."""
        return _digest("baffle/model/1", _changed_settings(self.task.model))

    def digest(self) -> bytes:
        return _digest("baffle/plan/2", _changed_settings(self))

    def to_toml(self) -> str:
        return msgspec.toml.encode(self).decode()


def _changed_settings(value: Any) -> Any:
    """A section's settings that differ from their defaults. A setting added later thus changes no older digest."""
    if isinstance(value, (tuple, list)):
        return [_changed_settings(item) for item in value]
    if not isinstance(value, Section):
        return value
    settings = {field.encode_name: getattr(value, field.name) for field in _unlike_default(value)}
    config = value.__struct_config__
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    return tag | {name: _changed_settings(setting) for name, setting in settings.items()}


def _unlike_default(section: Section) -> list[msgspec.structs.FieldInfo]:
    return [field for field in msgspec.structs.fields(section) if getattr(section, field.name) != field.default]


def _digest(tag: str, value: Any) -> bytes:
    return sha256(tag.encode() + b"\0" + msgspec.json.encode(value, order="sorted")).digest()
