"""The sections of a plan, frozen: types of settings, models, and the sections themselves.

`task`, `federation`, `probe`, `update` and `ring` determine the weights, and so do the groups of `secure` and the noise
of `privacy`. The rest of these two, and `run`, say how a run goes, and may change when it is resumed.

The meaning of a setting stands below it, as a string of Markdown whose links start from docs/. `scripts/reference.py`
turns these strings into the table in docs/plans.md. A test fails if a setting has none.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import prod
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

LARGEST = 2**63 - 1  # TOML, SQLite and the messages between client and server have no larger integers

LARGEST_FLOAT = 3.4028234663852886e38  # of 32 bits: weights are computed with such numbers

Count = Annotated[int, Meta(ge=1, le=LARGEST)]
OptionalCount = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST_FLOAT)]
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST_FLOAT)]
Proportion = Annotated[float, Meta(gt=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Hash = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
TensorShape = Annotated[tuple[Count, ...], Meta(max_length=64)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a plan; an unknown key in it is an error."""


@cache
def fields_of(section: type[Section]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The settings of a section. Looked up once: it takes longer than reading a plan."""
    return msgspec.structs.fields(section)


Activation = Literal["hardswish", "relu", "relu6", "selu", "gelu"]
Norm = Literal["none", "group", "batch"]


class ModelSettings(Section, frozen=True):
    """A model that a plan can name. `filled_in`: settings that a run fills in when it starts. `runtime`: the only
    runtime that runs it, if there is only one. `has_graph`: BAFFLE can make its ONNX graph without PyTorch."""

    runtime: ClassVar[str] = ""
    has_graph: ClassVar[bool] = False
    filled_in: ClassVar[tuple[str, ...]] = ()

    def unsettled(self) -> list[str]:
        """The settings that no run has filled in yet."""
        return [name for name in self.filled_in if not getattr(self, name)]

    def n_weights(self, _shape: Sequence[int], _outputs: int) -> int:
        """How many weights it has for samples of this shape, found without building it; 0 if its settings don't say."""
        return 0


class LeNet(ModelSettings, frozen=True, tag_field="name", tag="lenet"):
    """The paper's LeNet."""

    has_graph: ClassVar[bool] = True

    channels: tuple[Count, Count] = (16, 64)
    """its two convolutions; a plan without a model has `[8, 16]` and `head = "flatten"`"""
    head: Literal["average", "flatten"] = "average"
    """over positions; or `"flatten"`"""
    activation: Activation = "hardswish"
    """`"hardswish"`, `"relu"`, `"relu6"`, `"selu"`, `"gelu"`"""
    norm: Norm = "none"
    """`"none"`, `"group"`, or `"batch"` (the batch's own statistics, always)"""

    def n_weights(self, shape: Sequence[int], outputs: int) -> int:
        (first, second), positions = self.channels, 1 if self.head == "average" else prod(n // 2 for n in shape[1:])
        return first * (25 * shape[0] + 1) + second * (25 * first + 1) + outputs * (second * positions + 1)


class WRN(ModelSettings, frozen=True, tag_field="name", tag="wrn"):
    """A wide residual network of depth ten; with `widen = 2` the paper's WRN-10-2."""

    has_graph: ClassVar[bool] = True

    widen: Count = 2
    """its width; at 2 it has 302,794 weights on 3 × 32 × 32 and ten classes"""
    activation: Activation = "hardswish"
    norm: Norm = "group"

    def n_weights(self, shape: Sequence[int], outputs: int) -> int:
        widths = [16, 16 * self.widen, 32 * self.widen, 64 * self.widen]
        blocks = sum(10 * before * after + 9 * after * after for before, after in pairwise(widths))
        return 16 * (9 * shape[0] + 1) + blocks + outputs * (widths[-1] + 1)


class MobileNet(ModelSettings, frozen=True, tag_field="name", tag="mobilenet"):
    """MobileNetV2. ImageNet's weights were trained with relu6 and hold their BatchNorm."""

    filled_in: ClassVar[tuple[str, ...]] = ("scaling",)

    weights: Literal["imagenet", "random"] = "imagenet"
    """from `mobilenetv2/` in the data folder: torchvision's `mobilenet_v2-*.pth`, or an `.npz` of 53 folded weight/bias
    pairs; or `"random"`"""
    trained: Literal["head", "all"] = "head"
    """a new last layer, the rest frozen and computed once a sample; `"all"`: everything"""
    activation: Activation = "relu6"
    norm: Norm = "none"
    scaling: Literal["", "once"] = ""
    """filled in as `"once"` when a run starts. Runs of version 0.1 lack it, because most data sets' pixels were scaled
    twice; they can be verified, but neither resumed nor exported"""

    def n_weights(self, _shape: Sequence[int], outputs: int) -> int:
        return 2_206_816 + 1_281 * outputs


class Softmax(ModelSettings, frozen=True, tag_field="name", tag="softmax"):
    """Softmax regression: one linear layer."""

    has_graph: ClassVar[bool] = True

    def n_weights(self, shape: Sequence[int], outputs: int) -> int:
        return outputs * (prod(shape) + 1)


class Custom(ModelSettings, frozen=True, tag_field="name", tag="custom"):
    """A model of your own. `weights` and `says` identify a module that was given to `baffle.fit` as an object."""

    factory: str
    """`"module:function"`, which gives an `nn.Module`; it must be set"""
    train: tuple[str, ...] = ()
    """patterns of the names of the parameters that are trained (`["head.*"]`), or `["last"]` for the last layer; empty:
    all that are not frozen"""
    weights: Hash = ""
    """the SHA-256 of the initial weights of a module that was given to `baffle.fit` as an object; filled in by it"""
    says: tuple[float, ...] = ()
    """the module's outputs on a few samples, which identify it when the run is resumed; filled in by `baffle.fit`"""


class Onnx(ModelSettings, frozen=True, tag_field="name", tag="onnx"):
    """A model that came as ONNX, in the folder `run.model` that `baffle export --onnx` made."""

    runtime: ClassVar[str] = "onnx"
    filled_in: ClassVar[tuple[str, ...]] = ("graph",)

    graph: Hash = ""
    """the SHA-256 of the graph; filled in when a run starts"""


Model = LeNet | WRN | MobileNet | Softmax | Custom | Onnx


class TaskSettings(Section, frozen=True):
    """What is learnt, and by which model. The names of losses and metrics are in plan/tasks.py."""

    data: str = "digits"
    """`"mnist"`, `"usps"`, `"cifar10"`, `"cifar100"`, `"pacs"`, `"officehome"` ([where their files go](data.md)), or
    `"module:function"`, [a set of your own](data.md#a-set-of-your-own)"""
    pixels: Annotated[int, Meta(ge=0, le=1024)] = 0
    """size of the images of `"pacs"` and `"officehome"`; `0`: 128"""
    augment: bool = False
    """mirror and shift training images at random, by the key of the round and the client: for CIFAR, or a set of your
    own with an augmentation"""
    validation: bool = False
    """test on a fifth of the training samples (at most 10,000), which no client gets, and never on the test set: to
    choose settings. For simulations"""
    loss: str = "cross_entropy"
    """`"mse"`, `"mae"`, `"bce"`, or `"module:function"`: [losses and metrics](#losses-and-metrics)"""
    metrics: tuple[str, ...] = ()
    """metrics on the test set; empty: those that suit the loss. They do not affect the weights"""
    init: Literal["", "numpy"] = ""
    """`"numpy"`: initial weights are drawn from the seed by NumPy, the same on every runtime and machine, for
    `"lenet"`, `"wrn"` and `"softmax"` (other models bring their own); empty: by PyTorch, as in version 0.1"""
    model: Model = LeNet(channels=(8, 16), head="flatten")
    """`"wrn"` (depth ten), `"mobilenet"` (MobileNetV2, on [images](data.md#what-a-model-sees) of 32 × 32 at least),
    `"softmax"`, `"onnx"` with `run.model`, the folder of a [model from elsewhere](edge.md#models-from-elsewhere), or
    `"custom"` with `factory = "module:function"`, a [model of your own](#models-of-your-own)"""

    @property
    def draws_weights(self) -> bool:
        """Whether initial weights are drawn without PyTorch."""
        return self.init == "numpy" and self.model.has_graph


class Tier(Section, frozen=True):
    """Slower clients: this share of all clients evaluates only the first k directions."""

    k: Count
    share: Proportion


class FederationSettings(Section, frozen=True):
    """The clients: how many take part, what they hold, and how they train."""

    clients: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """the number of clients"""
    participation: Proportion = 1.0
    """share of the clients that take part in a round, drawn anew for each"""
    partition: Literal["iid", "dirichlet", "domain", "writer"] = "iid"
    """`"dirichlet"`, `"domain"`, `"writer"`: [who holds what](data.md#partitions)"""
    alpha: Positive = 0.3
    """for a `"dirichlet"` partition: the smaller α, the fewer classes a client has"""
    floor_samples: Count = 10
    """for a `"dirichlet"` partition: the least samples of a client"""
    level: Literal["batch", "epoch"] = "batch"
    """FedSGD; `"epoch"`: FedAvg"""
    seeds: Literal["shared", "own"] = "shared"
    """which directions a client probes at batch level; `"own"`: each client its own. A round then has K directions for
    each client, and a client sends the gradient that it estimates: n numbers instead of K"""
    batch: OptionalCount = 32
    """samples that a client probes on at once; `0`: all that it has"""
    epochs: Count = 1
    """local epochs, at epoch level"""
    steps: OptionalCount = 0
    """local steps at epoch level, batch after batch through a client's samples, as FedZO counts them; `0`: as many as
    `epochs` take"""
    local_steps: Annotated[int, Meta(ge=1, le=1000)] = 1
    """steps that a client takes in one round at batch level, each on the next batch and along directions of its own.
    Clients still send [scalars only](how-it-works.md#several-steps-in-a-round): `probe.k` for each step"""
    warm_up: Count = 10
    """with `local_steps`: so many rounds of one step come first"""
    weighting: Literal["samples", "uniform"] = "samples"
    """a client counts by its samples; `"uniform"`: all clients count the same"""
    tiers: tuple[Tier, ...] = ()
    """`[[federation.tiers]]` with `k` and `share`: this share of the clients evaluates only the first k directions"""
    dropout: Decay = 0.0
    """chance that a simulated client does not answer in a round"""


class ProbeSettings(Section, frozen=True):
    """The estimator's settings. A row of a layout: start, stop, start and stop of the support's tail, directions."""

    k: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    """directions a round (at epoch level: a local step)"""
    sigma: Positive = 1e-3
    """the step along a direction"""
    scheme: Literal["forward", "central"] = "forward"
    """K + 1 forwards; `"central"`: 2K"""
    distribution: str = "gaussian"
    """`"rademacher"` draws faster, at the same quality; `"sphere"`: Gaussian directions stretched to the length √n, as
    FedZO and DLZO have them (their step μ is σ·√n); `"outer"`: [products a bᵀ of
    ±1](how-it-works.md#outer-directions) for each weight matrix, which a server rebuilds many times quicker; not with
    `supports = "units"`; or `"module:function"`, [one of your own](architecture.md#arithmetic-of-your-own)"""
    distribution_source: Hash = ""
    """the SHA-256 of the file of a distribution of your own; filled in when a run starts"""
    micro_batch: OptionalCount = 0
    """samples in a forward pass; `0`: chosen when a run starts, up to 64 by rule, for larger batches by a short
    measurement"""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """`"bfloat16"`, `"float16"`: what the probes' forward passes are computed in. The moved weights are rounded to it;
    losses are taken in float32, and the weights themselves stay float32. For `supports = "dense"` and `"layers"`; slow
    on a CPU without instructions for it"""
    memory_mb: OptionalCount = 0
    """memory for probes in addition to the model and the batch: micro-batches are made small enough, or the plan is
    refused with the least memory that it needs ([how](performance.md#memory)); `0`: no limit. Outer directions share a
    pass as far as the memory allows. For `supports = "dense"` and `"layers"`, without a frozen backbone (unless
    directions are outer)"""
    supports: Literal["dense", "layers", "stages", "units", "auto"] = "dense"
    """`"layers"`: a direction touches one layer, for models whose layers have [unlike
    gradients](performance.md#one-layer-at-a-time); `"stages"`, `"units"`: one stage, or one output unit of a layer, at
    a fraction of a forward pass each ([how](performance.md#directions-that-touch-a-part-of-the-weights)); `"auto"`:
    whichever of dense, outer, stages and units is [the quickest to a
    scalar](performance.md#which-directions-are-the-quickest-here) when a run starts, which also sets `distribution`"""
    layout: tuple[tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount, Count], ...] = ()
    """the number of directions of each support; filled in when a run starts"""
    shapes: tuple[TensorShape, ...] = ()
    """the shapes of the model's trained tensors, for outer directions; filled in when a run starts"""
    together: OptionalCount = 0
    """how many outer directions [share a forward pass](performance.md#many-directions-in-one-pass) on PyTorch; `1`:
    each takes one of its own; `0`: chosen when a run starts, by what their tensors take, and `1` with a remark if the
    model does not allow more"""
    head: Literal["probed", "exact"] = "probed"
    """`"exact"`: the gradient of the model's last linear layer comes [exactly, and for no
    pass](how-it-works.md#the-last-layer), and directions are left for the other weights; clients then send a number for
    each weight of that layer besides their scalars, and [their sum tells
    more](security.md#what-an-exact-head-tells)"""
    head_at: tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount] = (0, 0, 0, 0)
    """where an exact head lies among the weights: start, stop, start and stop of its tail; filled in when a run
    starts"""
    stacked: bool = False
    """in a simulation: the samples of all clients of a round [go through the model
    together](performance.md#simulated-clients-together), which changes last bits. At batch level with shared seeds, for
    `supports = "dense"` and `"layers"`; networks refuse it"""

    @property
    def moves_whole_models(self) -> bool:
        """Whether a probe is a forward pass of the whole model, which any runtime can run."""
        return self.supports in ("dense", "layers", "auto")


class UpdateSettings(Section, frozen=True):
    """The optimizer's settings. A row of `layers`: start, stop, start and stop of the tail of a layer."""

    optimizer: str = "adam"
    """`"momentum"`, `"sgd"`, or `"module:function"`, [one of your own](architecture.md#arithmetic-of-your-own)"""
    optimizer_source: Hash = ""
    """the SHA-256 of the file of an optimizer of your own; filled in when a run starts"""
    moments: Literal["weights", "layers"] = "weights"
    """`"layers"`: adam has [one second moment for each layer](performance.md#one-layer-at-a-time) instead of one for
    each weight"""
    layers: tuple[tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount], ...] = ()
    """the layers of these moments; filled in when a run starts"""
    rate: Positive = 0.01
    """the length of a step; [`baffle tune`](tuning.md) finds one"""
    schedule: str = "constant"
    """how much of the rate a round has: `"warm-up"` rises evenly, `"cosine"` falls along half a cosine, `"steps"` falls
    again and again; or `"module:function"`, [one of your own](architecture.md#arithmetic-of-your-own)"""
    schedule_rounds: OptionalCount = 0
    """how many rounds a warm-up or a cosine takes, or lie between two steps; `0`: filled in when a run starts, with a
    tenth, all or a third of its rounds"""
    schedule_factor: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """the share of the rate that a cosine ends with, or that each step leaves of it"""
    schedule_source: Hash = ""
    """the SHA-256 of the file of a schedule of your own; filled in when a run starts"""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """for adam: how much of the first and of the second moment is kept from round to round"""
    momentum: Decay = 0.9
    """for `"momentum"`: how much of the last step is kept"""
    weight_decay: NonNegative = 0.0
    """this times the weights is added to the gradient"""
    clip: NonNegative = 0.0
    """rescale the gradient so that no entry exceeds this; `0`: no clipping"""
    ema: Decay = 0.995
    """moving average of the weights, for evaluation only; `0`: none"""
    norm_max: NonNegative = 0.0
    """skip a round that would move the weights further than this; `0`: no limit"""


class RingSettings(Section, frozen=True):
    """Bounds on the values in the ring."""

    d_max: Positive = 100.0
    """scalars are clipped to ± this; so are the entries of a gradient that a client estimates (`seeds = "own"`)"""
    update_max: Positive = 4.0
    """weight changes at epoch level, and gradients of `"backprop"`, are clipped to ± this"""
    head_max: Positive = 16.0
    """the gradient of an exact head is clipped to ± this, number by number"""
    n_max: OptionalCount = 0
    """cap on a client's sample weight; `0`: the largest client"""


class SecureSettings(Section, frozen=True):
    """The secure sum. The settings of groups, unlike the rest of this section, determine the weights."""

    mode: Literal["on", "malicious-server", "off"] = "on"
    """the secure sum; `"malicious-server"`: also against a server that lies, for one more exchange a round, with
    `weighting = "uniform"`; `"off"`: the server sees each client's values"""
    floor: Annotated[int, Meta(ge=2, le=LARGEST)] = 3
    """the smallest number of clients in a sum"""
    threshold: OptionalCount = 0
    """the number of shares that recover a secret; `0`: the lowest safe number"""
    liars: OptionalCount = 0
    """in `"malicious-server"`: how many of all clients may work with the server, below a third of them; `0`: just fewer
    than a third. The fewer, the [smaller groups can be](security.md#how-many-clients-may-lie)"""
    groups: Count = 1
    """the number of secure sums into which the clients of a round are divided, anew in every round; a client is hidden
    among its group"""
    group_seeds: Literal["shared", "own"] = "shared"
    """`"own"`: every group probes directions of its own (more of them for the same work)"""
    combine: Literal["mean", "median"] = "mean"
    """`"median"`: coordinate by coordinate over the groups, so that no single client can overwrite an update"""


class PrivacySettings(Section, frozen=True):
    """Differential privacy of a run for its clients; without noise and ε a run is not private. Noise, clipping norm and
    sharers determine the weights, unlike ε and δ."""

    noise: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """the standard deviation of the noise in a value of a sum, as a multiple of `clip`, even if clients drop out; `0`:
    it follows from `epsilon`, or the run is [not private](privacy.md). A private run needs `federation.weighting =
    "uniform"`, batch level and shared directions; in a network also a secure sum"""
    epsilon: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """the ε, at `delta`, that all planned rounds may cost a client that takes part in each. `noise` follows, and is
    written into the run's own plan; if you give both, too little noise is refused"""
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    """the δ of every ε of the run; well below one divided by the number of clients"""
    clip: NonNegative = 0.0
    """the largest L2 norm of a client's vector: its K scalars, or its gradient with `estimator = "backprop"`. It
    replaces `ring.d_max`. A private run needs one, and `baffle plan` proposes it"""
    head_factor: NonNegative = 0.0
    """how many times the numbers of an [exact head](how-it-works.md#the-last-layer) count in a client's vector; `0`:
    filled in when a run starts with √K, so that the noise of a weight is about the same in the head as elsewhere"""
    sharers: OptionalCount = 0
    """each client adds one part in this many of the noise's variance; `0`: filled in when a run starts with the number
    of clients that are certain to add noise: `secure.floor` or, if more, `secure.threshold`; in `"malicious-server"`
    the fewest survivors of a sum less the liars"""

    @property
    def on(self) -> bool:
        """Whether the run is private."""
        return self.noise > 0 or self.epsilon > 0


Derivatives = Literal["probes", "gradient"]


class RunSettings(Section, frozen=True):
    """How a run is executed. None of it affects the trajectory."""

    model: str = ""
    """the folder that `baffle export --onnx` made, for `task.model.name = "onnx"`"""
    runtime: Literal["", "onnx", "torch"] = ""
    """`"onnx"`: ONNX Runtime, `"torch"`: PyTorch; empty: ONNX Runtime if it is installed and can run the plan, else
    PyTorch ([what needs PyTorch](#what-needs-pytorch))"""
    derivatives: Derivatives = "probes"
    """in a simulation: how clients get their scalars; `"gradient"`: by [one backward
    pass](performance.md#clients-that-can-backpropagate) in place of K forward passes, which changes last bits. In a
    network each client decides for itself: `baffle join --derivatives gradient`"""
    downlink: Literal["scalars", "delta", "weights"] = "scalars"
    """how a client gets the present weights: by replaying rounds; `"delta"`: by their change; `"weights"`: by the
    weights themselves"""
    workers: OptionalCount = 0
    """threads; `0`: one per core"""
    device: str = "cpu"
    """a torch device; only the CPU has been tested"""
    evaluate_every: Count = 20
    """rounds between evaluations on the test set"""
    snapshot_every: Count = 100
    """rounds between snapshots of the weights in the journal"""
    commit_seconds: NonNegative = 1.0
    """seconds of work that a killed process may have to repeat"""
    features_mb: OptionalCount = 1024
    """memory for the features of a frozen backbone; the rest goes to a temporary file"""
    deadline_seconds: Positive = 60.0
    """in a network: how long the server waits for a client's answer"""
