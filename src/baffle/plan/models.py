"""The models that a plan can name."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from baffle.plan.setting import Count, Section

Activation = Literal["hardswish", "relu", "relu6", "selu", "gelu"]
Norm = Literal["none", "group", "batch"]


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


class WRN(ModelSettings, frozen=True, tag_field="name", tag="wrn"):
    """A wide residual network of depth ten; with `widen = 2` the paper's WRN-10-2."""

    has_graph: ClassVar[bool] = True

    widen: Count = 2
    """its width; at 2 it has 302,794 weights on 3 × 32 × 32 and ten classes"""
    activation: Activation = "hardswish"
    norm: Norm = "group"


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
    """filled in as `"once"` when a run starts. Runs of version 0.1 have none, because most data sets' pixels were
    scaled twice; they verify, and are neither resumed nor exported"""


class Softmax(ModelSettings, frozen=True, tag_field="name", tag="softmax"):
    """Softmax regression: one linear layer."""

    has_graph: ClassVar[bool] = True


class Custom(ModelSettings, frozen=True, tag_field="name", tag="custom"):
    """A model of the user's own. A module that was given to `baffle.fit` as an object is known again by `weights` and
    `says`."""

    factory: str
    """`"module:function"`, which gives an `nn.Module`; it must be set"""
    train: tuple[str, ...] = ()
    """patterns of the names of the parameters that are trained (`["head.*"]`), or `["last"]` for the last layer; empty:
    all that are not frozen"""
    weights: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """the SHA-256 of the initial weights of a module that was given to `baffle.fit` as an object; filled in by it"""
    says: tuple[float, ...] = ()
    """what that module says about a few samples, so that it is known again; filled in by `baffle.fit`"""


class Onnx(ModelSettings, frozen=True, tag_field="name", tag="onnx"):
    """A model that came as ONNX, in the folder `run.model` that `baffle export --onnx` made."""

    runtime: ClassVar[str] = "onnx"
    filled_in: ClassVar[tuple[str, ...]] = ("graph",)

    graph: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    """the SHA-256 of the graph; filled in when a run starts"""


Model = LeNet | WRN | MobileNet | Softmax | Custom | Onnx
