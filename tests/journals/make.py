"""Makes the small journals beside this file, one for each way in which an outcome can become weights.

They are made once and stay as they are: a later version must replay them to the same bits. To add one, add a line to
`CASES` and run `python tests/journals/make.py`; journals that exist are left alone.
"""

import json
from pathlib import Path

from baffle.journal.audit import verify
from baffle.plan import load
from baffle.simulation import simulate

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"

SMALL = (
    "rounds=4",
    "run.snapshot_every=3",
    'task.model={name="lenet", channels=[2, 4], head="flatten"}',
    "federation.clients=6",
    "federation.batch=8",
    "probe.k=12",
    "update.rate=0.01",
)

GROUPS = ("secure.groups=2", "secure.floor=2")

LAW = ("estimator=law", "probe.distribution=gaussian")

PRIVATE = ("federation.weighting=uniform", "privacy.clip=2.0")

LOCAL = ("federation.local_steps=3", "federation.warm_up=2")

CASES: dict[str, tuple[str, ...]] = {
    "gaussian": ("probe.distribution=gaussian",),
    "rademacher": ("probe.distribution=rademacher",),
    "sphere": ("probe.distribution=sphere",),
    "outer": ("probe.distribution=outer",),
    "outer-layers": ("probe.distribution=outer", "probe.supports=layers", "federation.tiers=[{k=6, share=0.5}]"),
    "outer-stages": ("probe.distribution=outer", "probe.supports=stages"),
    "outer-epoch": ("probe.distribution=outer", "federation.level=epoch", "federation.steps=2"),
    "outer-own-seeds": ("probe.distribution=outer", "federation.seeds=own"),
    "outer-groups": ("probe.distribution=outer", *GROUPS, "secure.group_seeds=own"),
    "central": ("probe.scheme=central",),
    "stages": ("probe.supports=stages",),
    "layers": ("probe.supports=layers", "federation.tiers=[{k=6, share=0.5}]"),
    "layer-moments": ("probe.supports=layers", "update.moments=layers", "update.clip=0.05", "update.weight_decay=0.01"),
    "units": ("probe.supports=units", "probe.k=40"),
    "exact-head": ("probe.head=exact", "federation.tiers=[{k=4, share=0.5}]"),
    "exact-head-units": ("probe.head=exact", "probe.supports=units", "probe.k=40"),
    "exact-head-epoch": ("probe.head=exact", "federation.level=epoch", "federation.steps=2"),
    "exact-head-groups": ("probe.head=exact", *GROUPS, "secure.group_seeds=own"),
    "exact-head-alone": ("probe.head=exact", 'task.model={name="softmax"}'),
    "exact-head-private": (*PRIVATE, "probe.head=exact", "privacy.noise=0.5"),
    "local-steps": (*LOCAL, "probe.head=exact", "federation.dropout=0.2"),
    "local-steps-groups": (*LOCAL, *GROUPS, "secure.group_seeds=own", "probe.supports=layers", "update.moments=layers"),
    "local-steps-momentum": (*LOCAL, "update.optimizer=momentum", "federation.tiers=[{k=4, share=0.5}]"),
    "local-steps-private": (*LOCAL, *PRIVATE, "privacy.noise=0.5", "probe.head=exact"),
    "tiers": ("federation.tiers=[{k=4, share=0.5}]",),
    "participation": ("federation.participation=0.5", "federation.weighting=uniform"),
    "groups-mean": GROUPS,
    "groups-median": (*GROUPS, "secure.groups=3", "secure.combine=median"),
    "groups-own-mean": (*GROUPS, "secure.group_seeds=own"),
    "groups-own-median": (*GROUPS, "secure.groups=3", "secure.group_seeds=own", "secure.combine=median"),
    "skipped": ("rounds=12", "federation.dropout=0.5"),
    "refused-update": ("rounds=8", "update.optimizer=sgd", "update.ema=0", "update.norm_max=0.018"),
    "own-seeds": ("federation.seeds=own",),
    "epoch": ("federation.level=epoch", "federation.steps=2"),
    "epoch-sphere": ("federation.level=epoch", "federation.steps=2", "probe.distribution=sphere"),
    "backprop": ("estimator=backprop",),
    "backprop-epoch": ("estimator=backprop", "federation.level=epoch", "federation.steps=3"),
    "law": (*LAW, *GROUPS),
    "law-layers": (*LAW, "probe.supports=layers", "probe.head=exact"),
    "law-own-seeds": (*LAW, "federation.seeds=own"),
    "law-epoch": (*LAW, "federation.level=epoch", "federation.steps=2"),
    "private": (*PRIVATE, "privacy.noise=0.5", "federation.tiers=[{k=4, share=0.3}]"),
    "private-groups": (*PRIVATE, *GROUPS, "privacy.epsilon=20", "secure.group_seeds=own"),
    "private-backprop": (*PRIVATE, "privacy.noise=0.5", "estimator=backprop"),
    "warm-up": ("update.schedule=warm-up", "update.schedule_rounds=3", "federation.level=epoch", "federation.steps=2"),
    "cosine": ("update.schedule=cosine", "update.schedule_factor=0.0", *LOCAL),
    "steps": ("update.schedule=steps", "update.schedule_factor=0.3", "update.optimizer=momentum", "rounds=6"),
    "sgd": ("update.optimizer=sgd", "update.ema=0"),
    "momentum": ("update.optimizer=momentum",),
    "adam-clip-decay": ("update.optimizer=adam", "update.clip=0.05", "update.weight_decay=0.01"),
}


def main() -> None:
    known: dict[str, dict[str, object]] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for name, settings in CASES.items():
        if name not in known:
            simulate(load("digits", (*SMALL, f"name={name}", *settings)), HERE / name)
            found = verify(HERE / name)
            known[name] = {"rounds": found.rounds, "skipped": found.skipped, "chain": found.chain}
            known[name] |= {"weights_sha256": found.weights_sha256, "trajectory_digest": found.trajectory_digest}
    EXPECTED.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
