"""However a run is played, it ends with the same bits: at once or in parts, with masks or without, by one worker or
more, whichever way weights reach the clients."""

import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from baffle.journal.audit import verify
from baffle.plan import Plan, change
from baffle.server.recorder import Summary
from baffle.simulation import resume, simulate
from baffle.task.load import load_task
from tests.conftest import FEW_KEYS
from tests.support.watched_runs import records_of

EPOCH = ("federation.level=epoch", "federation.batch=100")
STEPS = ("federation.level=epoch", "federation.steps=2")
BACKPROP = "estimator=backprop"
LENET = 'task.model={name="lenet", channels=[2, 3]}'
OUTER = (LENET, "probe.distribution=outer", "probe.k=12")
LAYERS = (LENET, "probe.supports=layers")
UNITS = (LENET, "probe.supports=units", "probe.k=24")
ONNX = ("task.init=numpy", "run.runtime=onnx")
SIX, TEN = "federation.clients=6", "federation.clients=10"
HALVES = "federation.tiers=[{k=3, share=0.5}]"
OWN_GROUPS = (SIX, "secure.groups=2", "secure.group_seeds=own")
DROPOUT = ("federation.clients=9", "federation.dropout=0.2", "rounds=8")

VARIANTS: dict[str, tuple[str, ...]] = {
    "forward": (),
    "central": ("probe.scheme=central",),
    "gaussian, momentum": ("probe.distribution=gaussian", "update.optimizer=momentum"),
    "sgd, no average, uniform": ("update.optimizer=sgd", "update.ema=0", "federation.weighting=uniform"),
    "clip and decay": ("update.clip=0.3", "update.weight_decay=0.01"),
    "own seeds": ("federation.seeds=own",),
    "own seeds, groups": (TEN, "federation.seeds=own", "secure.groups=3", "secure.combine=median"),
    "tiers": ("federation.tiers=[{k=2, share=0.4}]",),
    "few": (TEN, "federation.participation=0.4"),
    "full batch": ("federation.batch=0",),
    "epoch, central": (*EPOCH, "probe.scheme=central"),
    "epoch in one step": ("federation.level=epoch", "federation.batch=0", "federation.epochs=2"),
    "epoch of steps": STEPS,
    "backprop, epoch": (BACKPROP, *EPOCH),
    "batch norm": ('task.model={name="lenet", channels=[2, 3], norm="batch"}',),
    "half precision": (LENET, "probe.precision=bfloat16", "probe.sigma=0.05"),
    "clipped": ("ring.d_max=0.01",),
    "groups, own, median, tiers": (
        *(TEN, "secure.groups=3", "secure.group_seeds=own", "secure.combine=median"),
        "federation.tiers=[{k=2, share=0.1}]",
    ),
    "groups, epoch": (TEN, "secure.groups=3", "secure.combine=median", *EPOCH),
    "groups, few": ("federation.clients=14", "federation.participation=0.6", "secure.groups=2"),
    "dropout, few": ("federation.clients=14", "federation.participation=0.8", *DROPOUT[1:]),
    "dropout, tiers": (*DROPOUT, "federation.tiers=[{k=2, share=0.2}]"),
    "dropout, own seeds": (*DROPOUT, "federation.seeds=own"),
    "dropout, epoch": (*DROPOUT, *EPOCH, "rounds=4"),
    "dropout, groups": ("federation.clients=14", "federation.dropout=0.1", "secure.groups=2", "rounds=8"),
    "dropout, stacked": (*DROPOUT, "probe.stacked=true", HALVES),
    "stacked, outer": ("probe.stacked=true", "probe.distribution=outer", "probe.k=9"),
    "stacked on ONNX Runtime": ("probe.stacked=true", *ONNX),
    "stages": (LENET, "probe.supports=stages", "probe.k=12"),
    "stages of a residual net": ('task.model={name="wrn", widen=1}', "probe.supports=stages", "probe.k=8", "rounds=2"),
    "stages, epoch": (LENET, "probe.supports=stages", "probe.k=12", *STEPS),
    "units": UNITS,
    "units, tiers": (*UNITS, SIX, "federation.tiers=[{k=12, share=0.5}]"),
    "units, groups": (*UNITS, SIX, "secure.groups=2"),
    "layers, epoch": (*LAYERS, *STEPS),
    "layers on ONNX Runtime": (*LAYERS, *ONNX, "probe.k=7"),
    "layers in half precision and little memory": (
        *(*LAYERS, "probe.precision=bfloat16", "probe.sigma=0.1", "probe.memory_mb=20", "rounds=2"),
    ),
    "layers, tiers": (*LAYERS, "probe.k=24", SIX, "federation.tiers=[{k=12, share=0.5}]"),
    "layers on the sphere": (*LAYERS, "probe.distribution=sphere", "probe.scheme=central"),
    "layers, own seeds": (*LAYERS, "federation.seeds=own"),
    "layers, own groups": (*LAYERS, *OWN_GROUPS),
    "fewer directions than layers": (*LAYERS, "probe.k=2"),
    "moments of layers": (*LAYERS, "update.moments=layers"),
    "moments of layers, epoch": (*LAYERS, "update.moments=layers", *STEPS),
    "outer": OUTER,
    "outer, central": (*OUTER, "probe.scheme=central"),
    "outer on ONNX Runtime": (*OUTER, *ONNX),
    "outer, linear": ("probe.distribution=outer", "probe.k=12"),
    "outer, linear, layers": ("probe.distribution=outer", "probe.k=12", "probe.supports=layers"),
    "outer, layers on ONNX Runtime": (*OUTER, *ONNX, "probe.supports=layers"),
    "outer, stages": (*OUTER, "probe.supports=stages"),
    "outer, tiers": (*OUTER, SIX, "federation.tiers=[{k=5, share=0.5}]"),
    "outer, groups": (*OUTER, SIX, "secure.groups=2", "secure.combine=median"),
    "outer, own groups": (*OUTER, *OWN_GROUPS),
    "outer, own seeds": (*OUTER, "federation.seeds=own"),
    "outer, epoch": (*OUTER, *STEPS),
    "outer, half precision": (*OUTER, "probe.precision=bfloat16", "probe.sigma=0.05"),
    "outer, moments of layers": (*OUTER, "update.moments=layers"),
}
"""Settings that lead to different weights. Under all of them every round has enough survivors."""
SAME: dict[str, tuple[str, ...]] = {
    "floor of all": ("secure.floor=5",),
    "highest threshold": ("secure.threshold=5",),
    "just the floor": ("federation.clients=3", "secure.floor=3"),
    "two clients": ("federation.clients=2",),
    "clients agree": ("secure.mode=malicious-server",),
    "clients agree in groups": (TEN, "secure.groups=2", "secure.group_seeds=own", "secure.mode=malicious-server"),
    "clients agree, dropout": (
        *("federation.clients=12", "federation.dropout=0.1", "rounds=8", "secure.mode=malicious-server"),
    ),
    "keys run out": (f"rounds={FEW_KEYS + 3}",),
}
"""Settings of the secure sum."""
FLAT = 'task.model={name="lenet", channels=[2, 3], head="flatten"}'
SMALL = (FLAT, SIX, "federation.batch=8", "probe.k=12")
EXACT, SOFTMAX = (*SMALL, "probe.head=exact"), 'task.model={name="softmax"}'
FROZEN = ('task.model={name="custom", factory="tests.task.test_features:frozen"}', "run.runtime=torch")
MEDIAN = ("secure.groups=3", "secure.combine=median")
EXACT_HEADS: dict[str, tuple[str, ...]] = {
    "exact head": EXACT,
    "exact head on PyTorch": (*EXACT, "run.runtime=torch"),
    "exact head, central": (*EXACT, "probe.scheme=central"),
    "exact head, layers and tiers": (*EXACT, "probe.supports=layers", "federation.tiers=[{k=4, share=0.5}]"),
    "exact head, stages": (*EXACT, "probe.supports=stages"),
    "exact head, units": (*EXACT, "probe.supports=units", "probe.k=40"),
    "exact head, outer on PyTorch": (*EXACT, "probe.distribution=outer", "run.runtime=torch"),
    "exact head, outer layers": (*EXACT, "probe.distribution=outer", "probe.supports=layers"),
    "exact head, own groups": (*EXACT, *OWN_GROUPS),
    "exact head, median": (*EXACT, *MEDIAN),
    "exact head, own seeds": (*EXACT, "federation.seeds=own"),
    "exact head, epoch": (*EXACT, *STEPS),
    "exact head, stacked": (*EXACT, "probe.stacked=true"),
    "exact head alone": (*EXACT, SOFTMAX),
    "exact head, frozen backbone": (*EXACT, *FROZEN),
    "exact head alone, stacked": (*EXACT, SOFTMAX, "probe.stacked=true"),
}
LOCAL = (*SMALL, "federation.local_steps=3", "federation.warm_up=1", "rounds=4")
LOCAL_STEPS: dict[str, tuple[str, ...]] = {
    "local steps": (*LOCAL, "update.weight_decay=0.01"),
    "local steps, sgd": (*LOCAL, "update.optimizer=sgd", "update.rate=0.1"),
    "local steps, momentum": (*LOCAL, "update.optimizer=momentum"),
    "local steps, moments of layers": (*LOCAL, "update.moments=layers", "probe.supports=layers"),
    "local steps, exact head, tiers": (*LOCAL, "probe.head=exact", "federation.tiers=[{k=4, share=0.5}]"),
    "local steps, exact head alone": (*LOCAL, "probe.head=exact", SOFTMAX),
    "local steps on PyTorch, central": (*LOCAL, "run.runtime=torch", "probe.scheme=central"),
    "local steps, units": (*LOCAL, "probe.supports=units", "probe.k=40", "probe.head=exact"),
    "local steps, stages": (*LOCAL, "probe.supports=stages"),
    "local steps, outer": (*LOCAL, "probe.distribution=outer"),
    "local steps, few": (*LOCAL, "federation.participation=0.67"),
    "local steps, own groups": (*LOCAL, *OWN_GROUPS),
    "local steps, median": (*LOCAL, *MEDIAN),
    "local steps, dropout": (*LOCAL, "federation.clients=12", "federation.dropout=0.1"),
}
LAW = (*SMALL, "probe.distribution=gaussian", "estimator=law")
LAWS: dict[str, tuple[str, ...]] = {
    "law": LAW,
    "law, layers": (*LAW, "probe.supports=layers"),
    "law, units": (*LAW, "probe.supports=units", "probe.k=40"),
    "law, exact head": (*LAW, "probe.head=exact"),
    "law, exact head, units": (*LAW, "probe.head=exact", "probe.supports=units", "probe.k=40"),
    "law, own seeds": (*LAW, "federation.seeds=own"),
    "law, epoch": (*LAW, *STEPS),
    "law, groups": (*LAW, "secure.groups=2"),
    "law, dropout": (*LAW, "federation.clients=12", "federation.dropout=0.1"),
    "law, exact head alone": (*LAW, SOFTMAX, "probe.head=exact"),
}
QUICK = {
    *("exact head", "exact head, units", "exact head, own groups", "exact head, epoch", "exact head alone"),
    *("exact head, frozen backbone", "local steps", "local steps, exact head, tiers", "local steps, median"),
    *("local steps, dropout", "law", "law, own seeds", "law, epoch", "law, exact head, units"),
    *("forward", "central", "clip and decay", "tiers", "few", "epoch, central", "backprop, epoch", "batch norm"),
    *("half precision", "clipped", "own seeds, groups", "groups, own, median, tiers", "dropout, tiers"),
    *("dropout, stacked", "stages", "units", "layers on ONNX Runtime", "outer", "outer on ONNX Runtime"),
    *("moments of layers", "clients agree", "two clients", "keys run out"),
}
"""Each mechanism at least once. The other variants combine them."""
EVERY = VARIANTS | SAME | EXACT_HEADS | LOCAL_STEPS | LAWS

Ran = Callable[[str], tuple[Plan, Path, Summary]]


@pytest.fixture(scope="module")
def ran(tiny: Callable[..., Plan], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A variant's resolved plan, and its run by one worker, at once and without masks: simulated when a test first asks
    for it. Layouts are measured, so runs that are compared must share a resolved plan."""
    folder = tmp_path_factory.mktemp("variants")

    @cache
    def run(name: str) -> tuple[Plan, Path, Summary]:
        base = ("federation.clients=5", "secure.mode=on", "secure.floor=2", "rounds=2")
        plan = load_task(tiny(*base, *EVERY[name])).plan
        plain = simulate(change(plan, ["secure.mode=off", "run.workers=1"]), folder / name)
        return plan, folder / name, plain

    return run


def _events(run: Path) -> list[tuple[int, int, str]]:
    with sqlite3.connect(run / "journal.sqlite") as database:
        return database.execute("SELECT round, client, event FROM participation ORDER BY round, client").fetchall()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in EVERY]
)
def test_a_run_with_masks_and_in_parts_ends_with_the_same_weights(ran: Ran, tmp_path: Path, name: str) -> None:
    plan, path, plain = ran(name)
    simulate(change(plan, [f"rounds={plan.rounds // 2}", "run.workers=3"]), tmp_path / "run")
    downlink = "scalars" if name in LOCAL_STEPS and plan.update.optimizer != "sgd" else "delta"
    secure = resume(tmp_path / "run", [f"rounds={plan.rounds}", f"run.downlink={downlink}"], own_code=True)
    assert (secure["secure"], plain["secure"]) == (plan.secure.mode, "off")
    same = ("weights_sha256", "trajectory_digest", "test_accuracy", "train_loss", "forwards", "clipped", "dropouts")
    for key in (*same, "rounds", "skipped_rounds"):
        assert secure[key] == plain[key], key
    assert secure["plan_digest"] != plain["plan_digest"]
    assert (secure["rounds"], secure["skipped_rounds"]) == (plan.rounds, 0)
    assert (secure["dropouts"] > 0) == ("dropout" in name)
    assert (secure["clipped"] > 0) == (name == "clipped") or name in LOCAL_STEPS
    assert secure["uplink_bytes_per_client_round"] > plain["uplink_bytes_per_client_round"]
    of_secure, of_plain = verify(tmp_path / "run"), verify(path)
    assert (of_secure.rounds, of_secure.chain) == (of_plain.rounds, of_plain.chain)
    assert of_secure.weights_sha256 == secure["weights_sha256"]
    assert _events(tmp_path / "run") == _events(path)
    for one, other in zip(records_of(tmp_path / "run"), records_of(path), strict=True):
        for key in ("round", "loss", "contributors", "clipped"):
            assert one[key] == other[key], key


def test_clients_that_tell_no_loss_lead_to_the_same_weights(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    settings = ("federation.clients=4", "federation.weighting=uniform", "ring.n_max=7", "rounds=2")
    modes = ("off", "on", "malicious-server")
    off, on, silent = (simulate(tiny(*settings, f"secure.mode={mode}"), tmp_path / mode) for mode in modes)
    assert off["weights_sha256"] == on["weights_sha256"] == silent["weights_sha256"]
    assert off["train_loss"] == on["train_loss"] > 0
    assert silent["train_loss"] is None
    assert verify(tmp_path / "off").chain == verify(tmp_path / "malicious-server").chain


@pytest.mark.slow
def test_every_variant_leads_to_other_weights(ran: Ran) -> None:
    apart = [name for name in VARIANTS if not name.startswith(("outer", "layers", "units"))]
    assert len({ran(name)[2]["weights_sha256"] for name in apart}) == len(apart)
