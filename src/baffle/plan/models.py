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
