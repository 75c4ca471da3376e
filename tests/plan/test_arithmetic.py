"""Optimizers, schedules and distributions of your own: tried when they are loaded, named with the hash of their file,
and called only if somebody vouches for them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import baffle
from baffle.core.update import momentum
from baffle.errors import BaffleError, OwnFunctionError, PlanError, RefusalError
from baffle.export import export_plain, export_run
from baffle.journal.audit import verify
from baffle.network.member.consent import Consent
from baffle.network.member.policy import Policy
from baffle.plan import Plan, arithmetic, change, load
from baffle.simulation import resume, simulate
from baffle.task.load import load_task
from tests.support.command_line import Cli, refused
from tests.support.lines_in_memory import Federation, new_keys

MakePlan = Callable[..., Plan]

MINE = """
import numpy as np

CALLS = []


def lion(rate, betas):
    CALLS.append("lion")
    b1, b2, one, c = np.float32(betas[0]), np.float32(betas[1]), np.float32(1), np.float32(-rate)

    def update(state, g, w):
        return (b2 * state[0] + (one - b2) * g,), c * np.sign(b1 * state[0] + (one - b1) * g)

    return lambda w: (np.zeros_like(w),), update


def heavy(rate, momentum):
    b, c = np.float32(momentum), np.float32(-rate)

    def update(state, g, w):
        velocity = b * state[0] + g
        return (velocity,), c * velocity

    return lambda w: (np.zeros_like(w),), update, lambda state: update


def falling(number, rounds, factor):
    return max(factor, 1 - number / rounds)


def ternary(codes):
    return np.where(codes < 8192, -8192, np.where(codes < 16384, 8192, 0))


def of(update, freeze=None):
    parts = lambda w: (np.zeros_like(w),), update
    return parts if freeze is None else (*parts, freeze)


def in_place(rate):
    def update(state, g, w):
        g *= np.float32(2)
        return state, g
    return of(update)


random = np.random.default_rng()
shaken = lambda: of(lambda state, g, w: (state, g * np.float32(random.random())))
joined = lambda: of(lambda state, g, w: (state, g / np.float32(np.abs(g).max())))
wide = lambda: of(lambda state, g, w: (state, g.astype(np.float64)))
longer = lambda: of(lambda state, g, w: ((*state, g), g))
bare = lambda: 5
curved = lambda: of(lambda state, g, w: (state, g), lambda state: lambda state, g, w: (state, g * g))
raising = lambda: of(lambda state, g, w: 1 / 0)
unequal = lambda codes: np.where(codes < 40000, 4096, -4096)
huge = lambda codes: np.where(codes % 2 == 0, 65536, -65536)
rough = lambda codes: codes / 2
unsteady = lambda codes: np.where(random.permutation(65536) % 2 == 0, 4096, -4096)
beyond = lambda number, rounds, factor: 2.0
"""

OPTIMIZER, SCHEDULE = 'update.optimizer="mine:lion"', 'update.schedule="mine:falling"'
DISTRIBUTION = 'probe.distribution="mine:ternary"'
EACH = (OPTIMIZER, SCHEDULE, DISTRIBUTION)


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of these functions, for which nobody has vouched."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    strangers(monkeypatch)
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process: nothing is loaded, and nobody has vouched."""
    sys.modules.pop("mine", None)
    monkeypatch.setattr(arithmetic, "_vouched", set())
    for kept in (arithmetic._hash_of_file, arithmetic._function, arithmetic._optimizer, arithmetic._table):
        kept.cache_clear()


@pytest.mark.parametrize("settings", [*((one,) for one in EACH), EACH], ids=["optimizer", "schedule", "draws", "all"])
@pytest.mark.parametrize("level", ["batch", "epoch"])
def test_a_run_with_them_is_resumed_verified_and_exported(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], level: str
) -> None:
    plan = tiny(*settings, f"federation.level={level}", "rounds=8", "task.init=numpy")
    whole = simulate(plan, tmp_path / "whole")
    simulate(
        change(plan, ["rounds=4", "update.schedule_rounds=8"] if SCHEDULE in settings else ["rounds=4"]),
        tmp_path / "run",
    )
    strangers(monkeypatch)
    for refusing in (verify, lambda path: resume(path), lambda path: export_run(path, tmp_path / "m")):
        with pytest.raises(PlanError, match="own_code=True"):
            refusing(tmp_path / "run")
    with pytest.raises(PlanError, match="own_code=True"):
        baffle.open(tmp_path / "run").weights()
    assert "mine" not in sys.modules
    resumed = resume(tmp_path / "run", ["rounds=8"], own_code=True)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    strangers(monkeypatch)
    assert verify(tmp_path / "run", own_code=True).weights_sha256 == whole["weights_sha256"]
    export_plain(tmp_path / "run", tmp_path / "model.onnx", own_code=True)
    assert len(baffle.open(tmp_path / "run", own_code=True).weights()) == whole["n_weights"]
    assert load(str(tmp_path / "run" / "plan.toml")).trajectory_digest() != plan.trajectory_digest()


def test_the_command_line_calls_them_with_own_code_alone(
    cli: Cli, tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tiny(*EACH, "rounds=12"), tmp_path / "run")
    for command in (["verify"], ["run", "--resume"], ["export", "--out", tmp_path / "model"]):
        strangers(monkeypatch)
        refused(cli(*command, tmp_path / "run"), "mine:lion", "--own-code")
        assert "mine" not in sys.modules
    for harmless in ("report", "status"):
        assert cli(harmless, tmp_path / "run").returncode == 0
    assert "mine" not in sys.modules
    assert "a function of your own" in (tmp_path / "run" / "report.html").read_text()
    assert cli("verify", "--own-code", tmp_path / "run").returncode == 0
    refused(cli("join", "localhost:1", "--keys", "k", "--state", "s", "--own-code"), "--own-code belongs to --plan")


def test_a_strangers_name_reaches_a_terminal_as_one_short_line(tiny: MakePlan) -> None:
    plan = change(tiny(), {"update.optimizer": f"evil:\x1b[2J\n{'x' * 1000}"})
    with pytest.raises(PlanError) as refused:
        arithmetic.require_vouched(plan)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 250


def test_another_file_is_another_function(
    tiny: MakePlan, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tiny(OPTIMIZER), tmp_path / "run")
    mine.write_text(MINE + "\n# changed\n")
    strangers(monkeypatch)
    with pytest.raises(PlanError, match=r"mine:lion is not the function of this plan: the SHA-256 .* get the file"):
        verify(tmp_path / "run", own_code=True)


def test_a_file_that_is_edited_counts_once_it_is_imported_again(
    tiny: MakePlan, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_task(tiny(OPTIMIZER)).plan.update.optimizer_source
    mine.write_text(MINE + "\n# changed\n")
    assert load_task(tiny(OPTIMIZER)).plan.update.optimizer_source == before
    strangers(monkeypatch)
    assert load_task(tiny(OPTIMIZER)).plan.update.optimizer_source != before


def test_a_run_learns_with_all_of_them_and_its_steps_follow_the_schedule(tiny: MakePlan, tmp_path: Path) -> None:
    settings = ("rounds=40", "probe.k=40", "federation.batch=0", "update.rate=0.01", "update.ema=0")
    assert float(str(simulate(tiny(*EACH, *settings), tmp_path / "run")["test_accuracy"])) > 0.5
    plan = load(str(tmp_path / "run" / "plan.toml"))
    assert plan.update.schedule_rounds == 40
    assert {len(own.source) for own in arithmetic.own_of(plan)} == {64}
    constant = simulate(tiny(OPTIMIZER, DISTRIBUTION, *settings), tmp_path / "constant")
    assert constant["weights_sha256"] != baffle.open(tmp_path / "run")["weights_sha256"]


def test_an_optimizer_like_momentum_gives_the_bits_of_momentum(tiny: MakePlan) -> None:
    """Also in rounds of several steps, for which it gives a freeze."""
    settled = load_task(tiny("update.optimizer=mine:heavy", "update.rate=0.1")).plan
    mine, known = arithmetic.optimizer_of(settled.update), momentum(0.1)
    gradient, weights = np.random.default_rng(0).standard_normal((2, 50)).astype(np.float32)
    state = mine.init(weights)
    for update, same in ((mine.update, known.update), (mine.frozen(state), known.frozen(state))):
        (after, step), (expected, wanted) = update(state, gradient, weights), same(state, gradient, weights)
        np.testing.assert_array_equal((*after, step), (*expected, wanted))


def test_rounds_of_several_steps_need_a_freeze(tiny: MakePlan, tmp_path: Path) -> None:
    many = ("federation.local_steps=3", "federation.warm_up=1", "rounds=5")
    with pytest.raises(PlanError, match=r"mine:lion gives no freeze, which federation\.local_steps needs"):
        load_task(tiny(OPTIMIZER, *many))
    summary = simulate(tiny("update.optimizer=mine:heavy", *many), tmp_path / "run")
    assert verify(tmp_path / "run").weights_sha256 == summary["weights_sha256"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("update.optimizer=mine:in_place", "mine:in_place raised ValueError: .*read-only"),
        ("update.optimizer=mine:shaken", "mine:shaken is not deterministic"),
        ("update.optimizer=mine:joined", "mine:joined is not elementwise"),
        ("update.optimizer=mine:wide", r"its update must give \(state, step\): vectors of float32"),
        ("update.optimizer=mine:longer", r"its update must give \(state, step\): vectors of float32"),
        ("update.optimizer=mine:bare", r"mine:bare must return \(init, update\) or \(init, update, freeze\), got 5"),
        ("update.optimizer=mine:curved", "the update that its freeze gives is not linear"),
        ("update.optimizer=mine:raising", "mine:raising raised ZeroDivisionError"),
        ("update.optimizer=mine:missing", "mine:missing cannot be imported"),
        ("update.optimizer=time:time", "time:time must be in a file of its own"),
        ("update.schedule=mine:beyond", "mine:beyond must give a share from 0 to 1, got 2.0"),
        ("probe.distribution=mine:unequal", "with mean 0 and mean square 1, got up to 4096, 0.2207 and 1.0000"),
        ("probe.distribution=mine:huge", "expected integers up to 32767"),
        ("probe.distribution=mine:rough", "must give an integer for each of 65536 codes"),
        ("probe.distribution=mine:unsteady", "mine:unsteady is not deterministic"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_round_0(tiny: MakePlan, setting: str, says: str) -> None:
    with pytest.raises((OwnFunctionError, PlanError), match=says):
        load_task(tiny(setting))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('update.optimizer="lion"', "update.optimizer: expected one of 'adam', .* or \"package.module:function\""),
        ('update.schedule="linear"', "update.schedule: expected one of 'constant', 'warm-up', 'cosine', 'steps' or"),
        (f'update.optimizer_source="{"0" * 64}"', "update.optimizer_source: only a function of your own has one"),
        ('probe.distribution_source="abc"', "probe.distribution_source"),
        ("update.schedule_rounds=9", "update.schedule_rounds: a constant rate needs none"),
        ("update.schedule_factor=1.5", "update.schedule_factor"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tiny: MakePlan, setting: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        tiny(setting)


@pytest.mark.parametrize("setting", EACH)
def test_a_client_calls_them_only_in_a_pinned_plan_for_which_it_vouches(
    tiny: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    network = ("federation.clients=4", "secure.mode=on", "federation.batch=16")
    federation = Federation(new_keys(tmp_path, 4), tmp_path, tiny(setting, *network))
    named = setting.partition("=")[0]
    with pytest.raises(RefusalError, match=f"{named} comes from a function outside BAFFLE .* --plan"):
        Policy().require(federation.plan)
    keys = federation.keys[0]
    consent = Consent(keys, federation.member(0).memory, lambda *_: pytest.fail("equipped"), 0, federation.plan)
    with pytest.raises(BaffleError, match="--own-code"):
        consent._require_acceptable(federation.plan)
    arithmetic.vouch_for(federation.plan)
    lines = federation.lines(0)
    for number in range(4):
        lines.clients[number] = federation.member(number, pinned=federation.plan).answer
    summary = federation.serve(lines)
    strangers(monkeypatch)
    assert verify(federation.run, own_code=True).weights_sha256 == summary["weights_sha256"]
