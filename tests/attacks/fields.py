"""What becomes of each field of a statement, a plan and a manifest that a server changes, after the clients have pinned
the plan. Every field is here; test_every_field.py tries each, and compares the page with this.

python -m tests.attacks.fields            # write the tables in docs/fields.md
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from baffle.plan import Model, Plan, Section
from baffle.runtime.onnx.model_folder import Manifest
from baffle.statement import Statement
from tests.attacks.test_lying_models import HARMLESS as HARMLESS_IN_MANIFEST

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fields.md"
MODELS = get_args(Model)
NOUGHT = "0" * 64

REFUSED, HARMLESS, BOUNDED = "refused", "harmless", "bounded"


class Change(NamedTuple):
    """Another value of a field, what becomes of it, and why or how that shows. A refusal's log holds `words`. `beside`
    are settings that the server changes, too, so that the plan makes sense."""

    value: Any
    outcome: str = REFUSED
    why: str = "it is another plan than the pinned one"
    words: str = ""
    beside: dict[str, Any] = {}  # noqa: RUF012


def another(value: object, **beside: object) -> Change:
    return Change(value, beside={name.replace("__", "."): other for name, other in beside.items()})


OPEN = {f"privacy__{name}": 0.0 for name in ("noise", "epsilon", "clip", "head_factor")} | {"privacy__sharers": 0}
"""A plan without [privacy]."""


MACHINE = "it is a setting of the server's own machine", "holds settings of the server's own machine"
STUDY = "it is for simulations"
NO_FUNCTION = "the plan names no function there"
UNLIKE = "clients find it in their own model"

PLAN: dict[str, Change] = {
    "name": Change("other", HARMLESS, "clients send the same"),
    "seed": Change(1),
    "rounds": Change(10**6, BOUNDED, "`most_rounds` in the policy, or the plan's own rounds", "most_rounds allows"),
    "estimator": Change("backprop"),
    "task.data": Change("mnist"),
    "task.pixels": Change(64),
    "task.augment": Change(True),
    "task.validation": Change(True, REFUSED, STUDY, "task.validation: a server holds no"),
    "task.loss": Change("mse"),
    "task.metrics": Change(["top5"]),
    "task.init": Change(""),
    "task.model.name": Change("wrn"),
    "task.model.channels": Change([3, 3]),
    "task.model.head": Change("average"),
    "task.model.activation": Change("relu"),
    "task.model.norm": Change("group"),
    "federation.clients": Change(4, REFUSED, "a run has as many places as the roster", "but the roster has 5"),
    "federation.participation": another(0.8, privacy__sharers=2),
    "federation.partition": Change("dirichlet"),
    "federation.alpha": Change(0.1),
    "federation.floor_samples": Change(5),
    "federation.level": another("epoch", **OPEN),
    "federation.seeds": another("own", **OPEN),
    "federation.batch": Change(1),
    "federation.epochs": Change(2),
    "federation.steps": another(2, federation__level="epoch", **OPEN),
    "federation.local_steps": Change(2),
    "federation.warm_up": Change(3),
    "federation.weighting": another("samples", **OPEN),
    "federation.tiers": Change(
        [{"k": 1, "share": 0.7}], REFUSED, 'none in `"malicious-server"`', "federation.tiers do not go with"
    ),
    "federation.dropout": Change(0.5),
    "probe.k": another(7, probe__layout=[[0, 52, 0, 0, 3], [52, 154, 0, 0, 4]]),
    "probe.sigma": Change(1e-2),
    "probe.scheme": Change("central"),
    "probe.distribution": another("gaussian", probe__shapes=[], probe__together=0),
    "probe.distribution_source": Change(NOUGHT, REFUSED, NO_FUNCTION, "only a function of your own has one"),
    "probe.micro_batch": Change(
        3,
        HARMLESS,
        'clients send the same, up to the rounding of a mean; with `norm = "batch"`, that of smaller batches',
    ),
    "probe.precision": Change("float16"),
    "probe.memory_mb": Change(100),
    "probe.supports": another("dense", probe__layout=[]),
    "probe.layout": Change([[0, 1, 0, 0, 8]], REFUSED, UNLIKE, "is no support of task.model"),
    "probe.shapes": Change([[52], [102]], REFUSED, UNLIKE, "probe.shapes are not those"),
    "probe.together": Change(8, HARMLESS, "clients send the same, up to rounding, in at most 1 GB"),
    "probe.head": another("probed", probe__head_at=[0, 0, 0, 0]),
    "probe.head_at": Change([0, 2, 0, 0], REFUSED, UNLIKE, "probe.head_at is"),
    "probe.stacked": Change(True, REFUSED, STUDY, "probe.stacked: each client of a network"),
    "update.optimizer": another("sgd", update__moments="weights", update__layers=[]),
    "update.optimizer_source": Change(NOUGHT, REFUSED, NO_FUNCTION, "only a function of your own has one"),
    "update.moments": another("weights", update__layers=[]),
    "update.layers": Change([[0, 484, 0, 0]], REFUSED, UNLIKE, "update.layers are not those"),
    "update.rate": Change(0.5),
    "update.schedule": another("steps", update__schedule_rounds=1),
    "update.schedule_rounds": Change(1, REFUSED, "only a rate that changes has any", "a constant rate needs none"),
    "update.schedule_factor": Change(0.5),
    "update.schedule_source": Change(NOUGHT, REFUSED, NO_FUNCTION, "only a function of your own has one"),
    "update.betas": Change([0.5, 0.5]),
    "update.momentum": Change(0.5),
    "update.weight_decay": Change(0.5),
    "update.clip": Change(1.0),
    "update.ema": Change(0.5),
    "update.norm_max": Change(1.0),
    "ring.d_max": Change(1.0),
    "ring.update_max": Change(1.0),
    "ring.head_max": Change(1.0),
    "ring.n_max": Change(1000, HARMLESS, "all weights are 1; without noise, what clients send is rounded coarser"),
    "secure.mode": Change("on"),
    "secure.liars": Change(1),
    "secure.floor": Change(2),
    "secure.threshold": Change(5),
    "secure.groups": another(2, secure__floor=2, privacy__sharers=1),
    "secure.group_seeds": Change("own"),
    "secure.combine": Change("median"),
    "privacy.noise": Change(
        0.1,
        REFUSED,
        "clients count by themselves; more noise than ε needs is harmless",
        "6 rounds with noise 0.1 come to",
    ),
    "privacy.epsilon": Change(80.0),
    "privacy.delta": Change(0.1),
    "privacy.clip": Change(20.0),
    "privacy.head_factor": Change(1e6, BOUNDED, "clip and noise bound the whole vector, whatever its parts"),
    "privacy.sharers": Change(
        5, REFUSED, "clients count by themselves; with fewer there is more noise", "privacy.sharers: expected at most"
    ),
    "run.model": Change("elsewhere", REFUSED, MACHINE[0], "run.model is the folder"),
    "run.runtime": Change("torch", REFUSED, *MACHINE),
    "run.derivatives": Change("gradient", REFUSED, STUDY, "run.derivatives: each client of a network"),
    "run.downlink": Change("weights", REFUSED, "clients apply outcomes themselves", "run.downlink"),
    "run.workers": Change(1000, REFUSED, *MACHINE),
    "run.device": Change("cuda", REFUSED, *MACHINE),
    "run.evaluate_every": Change(1, REFUSED, *MACHINE),
    "run.snapshot_every": Change(1, REFUSED, *MACHINE),
    "run.commit_seconds": Change(9.0, REFUSED, *MACHINE),
    "run.features_mb": Change(1, REFUSED, *MACHINE),
    "run.deadline_seconds": Change(
        1e6, BOUNDED, "`most_seconds` in the policy, or the plan's own", "most_seconds allows"
    ),
}
"""Another value for each setting of a plan that leaves open whatever a plan can."""

OTHER_MODELS: dict[str, Change] = {
    "task.model.widen": Change(1),
    "task.model.weights": Change("random"),
    "task.model.trained": Change("all"),
    "task.model.scaling": Change(
        "once", HARMLESS, "it has one value in runs of this version; others are not continued"
    ),
    "task.model.factory": Change("os:getcwd"),
    "task.model.train": Change(["last"]),
    "task.model.says": Change([1.0]),
    "task.model.graph": Change(NOUGHT, REFUSED, "a graph needs its owner's approval, by a hash"),
}
"""Settings of other models than the one of the plan that is tried."""

STATEMENT: dict[str, Change] = {
    "protocol": Change(2, REFUSED, "clients take part in version 3 alone", "a message of type Statement"),
    "plan": Change(None, REFUSED, "see the settings below", "another than this client's --plan"),
    "initial": Change(bytes(32), REFUSED, "clients make the first weights themselves", "begins with other weights"),
    "roster": Change(2, REFUSED, "the authority signs rosters", "behind"),
    "roster_hash": Change(bytes(32), REFUSED, "the authority signs rosters", "is not this client's roster"),
    "tiers": Change((1, 8, 8, 8, 8), REFUSED, "the plan's K for everybody", "only some clients evaluate"),
    "epoch": Change(1, REFUSED, "the epochs before must be named", "are not those that the statement names"),
    "previous": Change(bytes([1] * 32), REFUSED, "it is the epoch before", "are not those that the statement names"),
    "first": Change(1, REFUSED, "the first epoch begins with round 0", "are not those that the statement names"),
    "chain": Change(bytes(32), REFUSED, "clients compute it from the first weights", "names another past"),
    "commitments": Change(
        None,
        REFUSED,
        "clients sign them; more than two thirds must be there",
        "committed to a nonce, expected at least 4",
    ),
    "unopened": Change(
        None, REFUSED, "evidence names clients outside the epoch, and is signed by them", "opened no nonce"
    ),
}


def settings_of_plans() -> set[str]:
    """Every setting of a plan, by its dotted name."""
    names = {f"task.model.{name}" for model in MODELS for name in ("name", *model.__struct_fields__)}
    return names | set(_settings(Plan, ""))


def _settings(section: type[Section], prefix: str) -> Iterator[str]:
    for field in msgspec.structs.fields(section):
        if field.type == Model:
            continue
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from _settings(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def tables() -> dict[str, str]:
    """The rows of each table of the page."""
    harmless = Change(None, HARMLESS, "clients make the graph of BAFFLE's own models themselves")
    unfit = Change(None, REFUSED, "it fits neither the plan nor the graph")
    manifest = {name: harmless if name in HARMLESS_IN_MANIFEST else unfit for name in Manifest.__struct_fields__}
    every = {"statement": STATEMENT, "plan": PLAN | OTHER_MODELS, "manifest": manifest}
    return {
        name: "\n".join(
            ["| field | changed for all | why |", "|---|---|---|"]
            + [f"| `{field}` | {change.outcome} | {change.why} |" for field, change in changes.items()]
        )
        for name, changes in every.items()
    }


def page(text: str) -> str:
    """The page with these tables."""
    for name, rows in tables().items():
        head, rest = text.split(f"<!-- {name} -->\n")
        text = f"{head}<!-- {name} -->\n{rows}\n{rest[rest.index('<!-- end -->') :]}"
    return text


assert set(Statement.__struct_fields__) == set(STATEMENT)

if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
