"""The sections of a plan, frozen.

`task`, `federation`, `probe`, `update` and `ring` determine the weights, and so do the groups of `secure`. The rest of
`secure`, and `run`, say how a run goes, and may change when it is resumed.
"""

from typing import Annotated, Literal

from msgspec import Meta

from baffle.plan.models import LeNet, Model
from baffle.plan.setting import LARGEST, Count, Decay, NonNegative, OptionalCount, Positive, Proportion, Section


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
    gives a support and its number of directions: start, stop, start and stop of its tail, count."""

    k: Annotated[int, Meta(ge=1, le=1_000_000)] = 32
    sigma: Positive = 1e-3
    scheme: Literal["forward", "central"] = "forward"
    distribution: str = "gaussian"
    micro_batch: OptionalCount = 0
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    memory_mb: OptionalCount = 0
    supports: Literal["dense", "layers", "stages", "units"] = "dense"
    layout: tuple[tuple[OptionalCount, OptionalCount, OptionalCount, OptionalCount, Count], ...] = ()

    @property
    def moves_whole_models(self) -> bool:
        """Whether a probe is a forward pass of the whole model, which any runtime can run."""
        return self.supports in ("dense", "layers")


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
