"""The sections of a plan, frozen.

`task`, `federation`, `probe`, `update` and `ring` determine the weights, and so do the groups of `secure` and the noise
of `privacy`. The rest of these two, and `run`, say how a run goes, and may change when it is resumed.
"""

from typing import Annotated, Literal

from msgspec import Meta

from baffle.plan.models import LeNet, Model
from baffle.plan.setting import (
    LARGEST,
    Count,
    Decay,
    NonNegative,
    OptionalCount,
    Positive,
    Proportion,
    Section,
    TensorShape,
)


class TaskSettings(Section, frozen=True):
    """What is learnt, and by which model. The names of losses and metrics are in plan/tasks.py."""

    data: str = "digits"
    """`"mnist"`, `"usps"`, `"cifar10"`, `"cifar100"`, `"pacs"`, `"officehome"` ([where their files go](data.md)), or
    `"module:function"`, [a set of your own](data.md#a-set-of-your-own)"""
    pixels: Annotated[int, Meta(ge=0, le=1024)] = 0
    """size of the images of `"pacs"` and `"officehome"`; `0`: 128"""
    augment: bool = False
    """training images are mirrored and shifted at random, by the round's and the client's key: CIFAR, or a set of your
    own that says how"""
    loss: str = "cross_entropy"
    """`"mse"`, `"mae"`, `"bce"`, or `"module:function"`: [losses and metrics](#losses-and-metrics)"""
    metrics: tuple[str, ...] = ()
    """what is measured on the test set; empty: what suits the loss. They do not determine the weights"""
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
    """Who takes part and how."""

    clients: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    """how many clients there are"""
    participation: Proportion = 1.0
    """share of the clients in a round, drawn anew for each"""
    partition: Literal["iid", "dirichlet", "domain", "writer"] = "iid"
    """`"dirichlet"`, `"domain"`, `"writer"`: [who holds what](data.md#partitions)"""
    alpha: Positive = 0.3
    """of a `"dirichlet"` partition: the smaller α, the fewer classes a client has"""
    floor_samples: Count = 10
    """of a `"dirichlet"` partition: the least number of a client's samples"""
    level: Literal["batch", "epoch"] = "batch"
    """FedSGD; `"epoch"`: FedAvg"""
    seeds: Literal["shared", "own"] = "shared"
    """whose directions a client probes at batch level; `"own"`: its own, so that a round has clients times K of them,
    and it sends the gradient that it estimates: n numbers up instead of K"""
    batch: OptionalCount = 32
    """samples a client probes on at once; `0`: all it has"""
    epochs: Count = 1
    """local ones, at epoch level"""
    steps: OptionalCount = 0
    """local steps at epoch level, batch after batch and lap after lap through a client's samples, as FedZO counts them;
    `0`: as many as `epochs` have"""
    weighting: Literal["samples", "uniform"] = "samples"
    """a client counts by its samples, or `"uniform"`"""
    tiers: tuple[Tier, ...] = ()
    """`[[federation.tiers]]` with `k` and `share`: this share of the clients evaluates only the first k directions"""
    dropout: Decay = 0.0
    """chance that a simulated client does not answer in a round"""


class ProbeSettings(Section, frozen=True):
    """The estimator's settings. A layout's row gives a support and its number of directions: start, stop, start and
    stop of its tail, count."""

    k: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    """directions a round (at epoch level: a local step)"""
    sigma: Positive = 1e-3
    """how far a probe moves along a direction"""
    scheme: Literal["forward", "central"] = "forward"
    """K + 1 forwards; `"central"`: 2K"""
    distribution: str = "gaussian"
    """`"rademacher"` draws faster, at the same quality; `"sphere"`: Gaussian directions stretched to the length √n, as
    FedZO and DLZO have them (their step μ is σ·√n); `"outer"`: [products a bᵀ of
    ±1](how-it-works.md#outer-directions) for each weight matrix, which a server rebuilds many times quicker; not with
    `supports = "units"`"""
    micro_batch: OptionalCount = 0
    """samples that go through the model at once; `0`: chosen at the start, up to 64 by rule, for larger batches by a
    short measurement"""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """`"bfloat16"`, `"float16"`: what the probes' forward passes are computed in. The moved weights are rounded to it;
    losses are taken in float32, and the weights themselves stay float32. For `supports = "dense"` and `"layers"`; slow
    on a CPU without instructions for it"""
    memory_mb: OptionalCount = 0
    """memory that probes may take beside the model and the batch: micro-batches are made small enough, or the plan is
    refused with the least that it needs ([how](performance.md#memory)); `0`: no limit. Outer directions share a
    pass as far as it goes. For `supports = "dense"` and `"layers"`, without a frozen backbone (unless directions are
    outer)"""
    supports: Literal["dense", "layers", "stages", "units", "auto"] = "dense"
    """`"layers"`: a direction touches one layer, for models whose layers have [unlike
    gradients](performance.md#one-layer-at-a-time); `"stages"`, `"units"`: one stage, or one output unit of a layer, at
    a fraction of a forward pass each ([how](performance.md#directions-that-touch-a-part-of-the-weights)); `"auto"`:
    whichever of dense, outer, stages and units is [the quickest to a
    scalar](performance.md#which-directions-are-the-quickest-here) when a run starts, which also sets `distribution`"""
    layout: tuple[tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount, Count], ...] = ()
    """how many directions each support has; filled in when a run starts"""
    shapes: tuple[TensorShape, ...] = ()
    """the shapes of the model's trained tensors, for outer directions; filled in when a run starts"""
    together: OptionalCount = 0
    """how many outer directions [share a forward pass](performance.md#many-directions-in-one-pass); `1`: each takes one
    of its own; `0`: chosen when a run starts, by what their tensors take, and `1` with a remark if the model does not
    allow more"""
    stacked: bool = False
    """in a simulation: the samples of all clients of a round [go through the model
    together](performance.md#simulated-clients-together), which changes last bits. At batch level with shared seeds, for
    `supports = "dense"` and `"layers"`; networks refuse it"""

    @property
    def moves_whole_models(self) -> bool:
        """Whether a probe is a forward pass of the whole model, which any runtime can run."""
        return self.supports in ("dense", "layers", "auto")

    @property
    def shares_passes(self) -> bool:
        """Whether outer directions share forward passes."""
        return self.distribution == "outer" and self.moves_whole_models and self.together > 1


class UpdateSettings(Section, frozen=True):
    """The optimizer's settings. A row of `layers`: start, stop, start and stop of the tail of a layer."""

    optimizer: str = "adam"
    """`"momentum"`, `"sgd"`"""
    moments: Literal["weights", "layers"] = "weights"
    """`"layers"`: adam has [one second moment for each layer](performance.md#one-layer-at-a-time) instead of one for
    each weight"""
    layers: tuple[tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount], ...] = ()
    """the layers of these moments; filled in when a run starts"""
    rate: Positive = 0.01
    """the length of a step; [`baffle tune`](tuning.md) finds one"""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """adam's: how much of the first and of the second moment is kept from round to round"""
    momentum: Decay = 0.9
    """of `"momentum"`: how much of the last step is kept"""
    weight_decay: NonNegative = 0.0
    """this times the weights is added to the gradient"""
    clip: NonNegative = 0.0
    """rescales the gradient so that no entry exceeds it; `0`: it is left as it is"""
    ema: Decay = 0.995
    """moving average of the weights, for evaluation only; `0`: none"""
    norm_max: NonNegative = 0.0
    """a round that would move the weights further than this is refused and skipped; `0`: none is"""


class RingSettings(Section, frozen=True):
    """Bounds on the values in the ring."""

    d_max: Positive = 100.0
    """scalars are clipped to ± this; so are the entries of a gradient that a client estimates (`seeds = "own"`)"""
    update_max: Positive = 4.0
    """weight changes at epoch level, and gradients of `"backprop"`, are clipped to ± this"""
    n_max: OptionalCount = 0
    """cap on a client's sample weight; `0`: the largest client"""


class SecureSettings(Section, frozen=True):
    """The secure sum. The settings of groups, unlike the rest of this section, determine the weights."""

    mode: Literal["on", "malicious-server", "off"] = "on"
    """the secure sum; `"malicious-server"`: also against a server that lies, for one more exchange a round; `"off"`:
    the server sees each client's values"""
    floor: Annotated[int, Meta(ge=2, le=LARGEST)] = 3
    """the smallest number of clients in a sum"""
    threshold: OptionalCount = 0
    """how many shares recover a secret; `0`: the lowest safe number"""
    groups: Count = 1
    """secure sums that the clients of a round are divided into, anew in every round; a client is hidden among its
    group"""
    group_seeds: Literal["shared", "own"] = "shared"
    """`"own"`: every group probes directions of its own (more of them for the same work)"""
    combine: Literal["mean", "median"] = "mean"
    """`"median"`: coordinate by coordinate over the groups, so that no single client can overwrite an update"""


class PrivacySettings(Section, frozen=True):
    """Differential privacy of a run for its clients; without noise and ε a run is not private. Noise, clipping norm and
    sharers determine the weights, unlike ε and δ."""

    noise: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """the standard deviation of the noise in a value of a sum, as a multiple of `clip`: at least that, whoever drops
    out; `0`: it follows from `epsilon`, or the run is [not private](privacy.md). A private run needs
    `federation.weighting = "uniform"`, batch level and shared directions; in a network also a secure sum"""
    epsilon: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """the ε, at `delta`, that all planned rounds may cost a client that takes part in each. `noise` follows, and is
    written into the run's own plan; if both are given, too little noise is refused"""
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    """the δ of every ε that a run tells; well below one in the number of clients"""
    clip: NonNegative = 0.0
    """the longest (in L2 norm) that a client's vector may be: its K scalars, or its gradient with
    `estimator = "backprop"`. It takes the place of `ring.d_max`. A private run needs one, and `baffle plan` proposes
    it"""
    sharers: OptionalCount = 0
    """each client adds one part in so many of the noise's variance; `0`: in as many as are certain to add theirs,
    filled in when a run starts: `secure.floor` or, if more, `secure.threshold`; in `"malicious-server"` the fewest
    survivors of a sum without the liars"""

    @property
    def on(self) -> bool:
        """Whether the run is private."""
        return self.noise > 0 or self.epsilon > 0


class RunSettings(Section, frozen=True):
    """How a run is executed. None of it affects the trajectory."""

    model: str = ""
    """the folder that `baffle export --onnx` made, for `task.model.name = "onnx"`"""
    runtime: Literal["", "onnx", "torch"] = ""
    """`"onnx"`: ONNX Runtime, `"torch"`: PyTorch; empty: ONNX Runtime if it is installed and can run the plan, else
    PyTorch ([what needs PyTorch](#what-needs-pytorch))"""
    downlink: Literal["scalars", "delta", "weights"] = "scalars"
    """how a client gets to the present weights: by rounds that it replays; `"delta"`: by their change, `"weights"`: by
    the weights themselves"""
    workers: OptionalCount = 0
    """threads; `0`: one per core"""
    device: str = "cpu"
    """a torch device; only the CPU has been tested"""
    evaluate_every: Count = 20
    """rounds between evaluations on the test set"""
    snapshot_every: Count = 100
    """rounds between snapshots of the weights in the journal"""
    commit_seconds: NonNegative = 1.0
    """how much work a killed process may have to repeat"""
    features_mb: OptionalCount = 1024
    """memory for the features of a frozen backbone; the rest goes to a temporary file"""
    deadline_seconds: Positive = 60.0
    """in a network: how long the server waits for a client's answer"""
