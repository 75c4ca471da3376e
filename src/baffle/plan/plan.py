"""A plan and the digests that name it.

The sections `task`, `federation`, `probe`, `update` and `ring` with `seed`, `estimator` and the groups of `secure`
determine the weights; their digest names the trajectory. So do noise and clipping of a private run. `rounds`, `run` and
the rest of `secure` and `privacy` say how far and how a run goes, and may change when it is resumed.
"""

from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baffle.plan.sections import (
    LARGEST,
    Count,
    FederationSettings,
    PrivacySettings,
    ProbeSettings,
    RingSettings,
    RunSettings,
    Section,
    SecureSettings,
    TaskSettings,
    UpdateSettings,
    fields_of,
)

LYING = "malicious-server"


class Plan(Section, frozen=True):
    name: str = "run"
    """names the folder under `runs/`"""
    seed: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    """the root of every random choice"""
    rounds: Count = 400
    """how many rounds a run has"""
    estimator: Literal["probe", "backprop", "law"] = "probe"
    """`"backprop"`: the baseline, in the same loop; `"law"`: nothing is probed, an estimate is [drawn from its
    law](how-it-works.md#the-law-of-an-estimate) around a gradient by backpropagation: a study of what K directions
    would do, in a simulation and with Gaussian directions"""
    task: TaskSettings = TaskSettings()
    federation: FederationSettings = FederationSettings()
    probe: ProbeSettings = ProbeSettings()
    update: UpdateSettings = UpdateSettings()
    ring: RingSettings = RingSettings()
    secure: SecureSettings = SecureSettings()
    privacy: PrivacySettings = PrivacySettings()
    run: RunSettings = RunSettings()

    @property
    def per_round(self) -> int:
        """How many clients take part in a round."""
        return max(1, round(self.federation.clients * self.federation.participation))

    def needs_torch(self) -> str:
        """The first setting that needs PyTorch; empty if ONNX Runtime can run the plan, too."""
        task, probe = self.task, self.probe
        settings = (
            ("task.model.name", not task.model.runtime and not task.model.has_graph),
            ("task.init", not task.model.runtime and not task.draws_weights),
            ("estimator", self.estimator != "probe"),
            ("probe.supports", not probe.moves_whole_models),
            ("probe.precision", probe.precision != "float32"),
            ("probe.memory_mb", probe.memory_mb > 0),
            ("run.derivatives", self.run.derivatives != "probes"),
            ("run.device", self.run.device != "cpu"),
        )
        return next((name for name, needed in settings if needed), "")

    @property
    def group_sizes(self) -> tuple[int, int]:
        """The smallest and the largest number of clients that are summed together."""
        return self.per_round // self.secure.groups, -(-self.per_round // self.secure.groups)

    def steps_before(self, rounds: int) -> int:
        """How many steps the first rounds have together."""
        federation = self.federation
        return rounds + max(0, rounds - federation.warm_up) * (federation.local_steps - 1)

    @property
    def own_seeds(self) -> bool:
        """Whether every group has directions of its own."""
        return self.secure.group_seeds == "own" and self.outcome_kind == "scalars"

    @property
    def _shares_directions(self) -> bool:
        """Whether clients have the same directions, at the same weights."""
        return self.federation.level == "batch" and self.federation.seeds == "shared"

    @property
    def outcome_kind(self) -> Literal["scalars", "vector"]:
        """ "scalars" if the server rebuilds the gradient, "vector" if clients send weight changes or gradients."""
        return "scalars" if self.estimator == "probe" and self._shares_directions else "vector"

    @property
    def draws_for_all(self) -> bool:
        """Whether one estimate is drawn from the law for all clients, when their mean gradient is applied. Otherwise,
        each client draws its own."""
        return self.estimator == "law" and self._shares_directions

    @property
    def scalars(self) -> Literal["probed", "drawn"] | None:
        """Where a run's scalars come from; None for backpropagation, which has none."""
        return {"probe": "probed", "law": "drawn", "backprop": None}[self.estimator]

    @property
    def head_size(self) -> int:
        """How many weights an exact head has, as far as the plan knows it; 0 for one that is probed."""
        start, stop, first, last = self.probe.head_at
        return stop - start + last - first if self.estimator != "backprop" else 0

    def trajectory_digest(self) -> bytes:
        """Identifies everything that determines the weights."""
        plan = _changed_settings(self)
        secure = _changed_settings(self.secure)
        parts = ("seed", "estimator", "task", "federation", "probe", "update", "ring")
        groups = ("groups", "group_seeds", "combine")
        determines = {part: plan[part] for part in parts if part in plan}
        if measured := determines.get("task", {}).keys() & {"metrics"}:  # metrics do not affect the weights
            determines["task"] = {name: value for name, value in plan["task"].items() if name not in measured}
        determines["secure"] = {name: secure[name] for name in groups if name in secure}
        private = _changed_settings(self.privacy)
        if noise := {name: private[name] for name in ("noise", "clip", "sharers", "head_factor") if name in private}:
            determines["privacy"] = noise
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
    settings = ((field, getattr(value, field.name)) for field in fields_of(type(value)))
    changed = {field.encode_name: _changed_settings(own) for field, own in settings if own != field.default}
    config = value.__struct_config__
    return {config.tag_field: config.tag} | changed if config.tag_field else changed


def _digest(tag: str, value: Any) -> bytes:
    return sha256(tag.encode() + b"\0" + msgspec.json.encode(value, order="sorted")).digest()
