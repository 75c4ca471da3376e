"""Plans: what they accept, what they refuse and how they say so, and what their two digests cover."""

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import baffle
from baffle.errors import PlanError
from baffle.plan import (
    Custom,
    FederationSettings,
    LeNet,
    Plan,
    ProbeSettings,
    RingSettings,
    RunSettings,
    Section,
    SecureSettings,
    Softmax,
    TaskSettings,
    Tier,
    UpdateSettings,
    build,
    change,
    load,
    parse,
    presets,
)
from baffle.plan.functions import call_own

NOT_OF_THE_TRAJECTORY = (
    *("name", "rounds", "run.", "secure.mode", "secure.floor", "secure.threshold"),
    *("privacy.epsilon", "privacy.delta"),
)


def test_every_preset_file_is_listed_loads_and_is_called_by_its_name() -> None:
    files = sorted(path.stem for path in (Path(baffle.__file__).parent / "plans").glob("*.toml"))
    assert presets() == files
    assert {"digits", "paper-mnist-lenet"} <= set(files)
    for name in files:
        assert load(name).name == name


def test_the_default_is_the_digits_preset_with_few_scalars() -> None:
    assert load() == load("digits")
    assert load().task.data == "digits"
    assert load().federation.clients == 10
    assert load().probe.k <= 100


def test_the_papers_preset_has_the_papers_settings() -> None:
    plan = load("paper-mnist-lenet")
    assert plan.probe.sigma == 1e-4
    assert plan.task == TaskSettings(
        data="mnist", model=LeNet(channels=(16, 64), head="average", activation="hardswish")
    )
    assert (plan.update.optimizer, plan.update.rate, plan.update.ema) == ("adam", 0.01, 0.995)


@pytest.mark.parametrize("name", ["fedzo-mnist", "dlzo-mnist"])
def test_the_rivals_probe_as_far_as_they_say(name: str) -> None:
    """FedZO's step of 0.001 on the unit sphere is a σ that is shorter by √n."""
    plan = load(name)
    assert plan.probe.sigma * 10_250**0.5 == pytest.approx(1e-3, rel=1e-3)
    assert plan.probe.distribution == "sphere"
    assert (plan.update.optimizer, plan.update.ema, plan.outcome_kind) == ("sgd", 0, "vector")


def test_the_authors_plan_is_the_papers_but_for_what_their_code_adds() -> None:
    theirs, adds = load("authors-mnist-lenet"), ["update.clip=0.3", "update.weight_decay=5e-4", "federation.seeds=own"]
    ours = load("paper-mnist-lenet", ["federation.level=batch", *adds])
    assert theirs.trajectory_digest() == ours.trajectory_digest()


@pytest.mark.parametrize(("name", "level"), [("fedsgd-mnist-lenet", "batch"), ("fedavg-mnist-lenet", "epoch")])
def test_plans_of_backpropagation_differ_from_the_papers_in_nothing_that_it_uses(name: str, level: str) -> None:
    ours, theirs = load("paper-mnist-lenet", [f"federation.level={level}"]), load(name)
    assert theirs.estimator == "backprop"
    assert (theirs.task, theirs.federation, theirs.update) == (ours.task, ours.federation, ours.update)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("probe.k=50", 50),
        ("  probe.k  =  50  ", 50),
        ("probe.sigma=1e-2", 0.01),
        ("probe.sigma=1", 1.0),
        ('probe.scheme="central"', "central"),
        ("probe.scheme=central", "central"),
        ("name=two words", "two words"),
        ("update.betas=[0.8, 0.95]", (0.8, 0.95)),
        ('task.model={name="softmax"}', Softmax()),
        ("task.model.channels=[2, 3]", (2, 3)),
        ("federation.tiers=[{k=2, share=0.5}]", (Tier(k=2, share=0.5),)),
    ],
)
def test_a_setting_is_read_as_toml_or_as_a_word(setting: str, expected: object) -> None:
    value: Any = load("digits", [setting])
    for name in setting.partition("=")[0].strip().split("."):
        value = getattr(value, name)
    assert value == expected
    assert type(value) is type(expected)


def test_later_settings_win_and_settings_may_open_a_section() -> None:
    assert parse("", ["probe.k=5", "probe.k=7", "ring.d_max=3"]) == Plan(
        probe=ProbeSettings(k=7), ring=RingSettings(d_max=3.0)
    )


def test_change_lays_settings_over_a_plan() -> None:
    plan = Plan(probe=ProbeSettings(k=9))
    assert change(plan, ["rounds=2"]) == Plan(probe=ProbeSettings(k=9), rounds=2)
    assert plan.rounds == Plan().rounds


@pytest.mark.parametrize("setting", ["nothing", "=3", " =3", ""])
def test_a_setting_without_key_or_value_is_refused(setting: str) -> None:
    with pytest.raises(PlanError, match=r"section\.key=value"):
        load("digits", [setting])


@pytest.mark.parametrize("setting", ["probe.k.x=3", "name.x.y=3", "federation.tiers.k=3"])
def test_a_setting_cannot_go_below_a_value(setting: str) -> None:
    with pytest.raises(PlanError, match="is a value, not a table"):
        parse('name = "a"\nfederation.tiers = []\nprobe.k = 3', [setting])


@pytest.mark.parametrize(
    ("setting", "key", "nearest"),
    [
        ("probe.sigm=1", "probe.sigm", "probe.sigma"),
        ("prob.k=3", "prob", "probe"),
        ("federation.client=3", "federation.client", "federation.clients"),
        ("update.learning_rate=3", "update.learning_rate", None),
        ("round=3", "round", "rounds"),
        ("task.model.channel=[1, 2]", "task.model.channel", "task.model.channels"),
        ("run.worker=3", "run.worker", "run.workers"),
        ("secure.flor=3", "secure.flor", "secure.floor"),
        ("federation.dropouts=0.1", "federation.dropouts", "federation.dropout"),
        ("federation.tiers=[{k=2, shar=0.5}]", "shar", "share"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(setting: str, key: str, nearest: str | None) -> None:
    with pytest.raises(PlanError) as refused:
        load("digits", [setting])
    message = str(refused.value)
    assert key in message
    assert "\n" not in message
    if nearest:
        assert re.search(rf"did you mean \S*{re.escape(nearest)}\?", message)


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("probe.k=many", "probe.k", "many"),
        ("probe.k=1.5", "probe.k", "1.5"),
        ("probe.k=true", "probe.k", "True"),
        ("probe.k=0", "probe.k", "0"),
        ("probe.k=-3", "probe.k", "-3"),
        ("probe.k=1000001", "probe.k", "1000001"),
        ("probe.sigma=0", "probe.sigma", "0"),
        ("probe.sigma=-1e-3", "probe.sigma", "-0.001"),
        ("probe.sigma=nan", "probe.sigma", "nan"),
        ("probe.sigma=inf", "probe.sigma", "inf"),
        ("probe.scheme=sideways", "probe.scheme", "sideways"),
        ("probe.micro_batch=-1", "probe.micro_batch", "-1"),
        ("federation.clients=0", "federation.clients", "0"),
        ("federation.clients=two", "federation.clients", "two"),
        ("federation.participation=0", "federation.participation", "0"),
        ("federation.participation=1.01", "federation.participation", "1.01"),
        ("federation.batch=-1", "federation.batch", "-1"),
        ("federation.partition=sorted", "federation.partition", "sorted"),
        ("federation.alpha=0", "federation.alpha", "0"),
        ("federation.alpha=nan", "federation.alpha", "nan"),
        ("federation.floor_samples=0", "federation.floor_samples", "0"),
        ("task.pixels=-1", "task.pixels", "-1"),
        ("task.pixels=1025", "task.pixels", "1025"),
        ("task.augment=1", "task.augment", "1"),
        ("federation.epochs=0", "federation.epochs", "0"),
        ("federation.dropout=1", "federation.dropout", "1"),
        ("federation.dropout=-0.1", "federation.dropout", "-0.1"),
        ("federation.level=sample", "federation.level", "sample"),
        ("federation.tiers=[{k=0, share=0.5}]", "k", "0"),
        ("federation.tiers=[{k=1, share=0}]", "share", "0"),
        ("update.rate=0", "update.rate", "0"),
        ("update.rate=inf", "update.rate", "inf"),
        ("update.betas=[0.9, 1.0]", "update.betas", "1.0"),
        ("update.betas=[0.9]", "update.betas", "[0.9]"),
        ("update.clip=-1", "update.clip", "-1"),
        ("update.ema=1", "update.ema", "1"),
        ("update.weight_decay=-0.1", "update.weight_decay", "-0.1"),
        ("update.optimizer=adamw", "update.optimizer", "adamw"),
        ("ring.d_max=0", "ring.d_max", "0"),
        ("ring.d_max=inf", "ring.d_max", "inf"),
        ("ring.update_max=inf", "ring.update_max", "inf"),
        ("ring.update_max=-1", "ring.update_max", "-1"),
        ("secure.mode=maybe", "secure.mode", "maybe"),
        ("secure.mode=true", "secure.mode", "True"),
        ("secure.floor=1", "secure.floor", "1"),
        ("secure.floor=2.5", "secure.floor", "2.5"),
        ("secure.threshold=-1", "secure.threshold", "-1"),
        ("secure.groups=0", "secure.groups", "0"),
        ("secure.group_seeds=each", "secure.group_seeds", "each"),
        ("secure.combine=max", "secure.combine", "max"),
        ("update.norm_max=-1", "update.norm_max", "-1"),
        ("run.evaluate_every=0", "run.evaluate_every", "0"),
        ("run.snapshot_every=0", "run.snapshot_every", "0"),
        ("run.commit_seconds=-1", "run.commit_seconds", "-1"),
        ("run.downlink=pigeon", "run.downlink", "pigeon"),
        ("rounds=0", "rounds", "0"),
        ("seed=-1", "seed", "-1"),
        ("seed=9223372036854775808", "seed", "9223372036854775808"),
        ("name=5", "name", "5"),
        ("task.model.name=vgg", "task.model.name", "vgg"),
        ("task.model.channels=[0, 3]", "task.model.channels", "0"),
        ("probe=5", "probe", "5"),
    ],
)
def test_a_value_out_of_range_or_of_the_wrong_type_is_named_with_its_key(setting: str, key: str, value: str) -> None:
    with pytest.raises(PlanError) as refused:
        load("digits", [setting])
    message = str(refused.value)
    assert key in message
    assert value in message.partition(":")[2]
    assert "\n" not in message
    assert "`" not in message


@pytest.mark.parametrize("model", ["{}", '{name="custom"}'])
def test_a_model_lacking_a_needed_key_is_refused(model: str) -> None:
    with pytest.raises(PlanError, match=r"task\.model.*(name|factory)"):
        load("digits", [f"task.model={model}"])


@pytest.mark.parametrize("setting", ['federation.level="epoch"', 'estimator="backprop"'])
def test_tiers_need_scalars(setting: str) -> None:
    with pytest.raises(PlanError, match=r"federation\.tiers"):
        load("digits", ["federation.tiers=[{k=2, share=0.5}]", setting])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["federation.seeds=own", 'estimator="backprop"'], r'federation\.seeds.*estimator = "probe", got "backprop"'),
        (["federation.seeds=own", 'federation.level="epoch"'], r'federation\.seeds.*level = "batch", got "epoch"'),
        (["federation.seeds=own", "secure.groups=3", "secure.group_seeds=own"], r"federation\.seeds.*group_seeds"),
        (["federation.seeds=own", "federation.tiers=[{k=2, share=0.5}]"], r"federation\.tiers.*seeds"),
        (["federation.steps=3"], r'federation\.steps.*level = "epoch", got "batch"'),
        (["federation.steps=3", "federation.epochs=2", 'federation.level="epoch"'], r"steps = 3.*epochs = 2"),
    ],
)
def test_own_seeds_and_local_steps_are_refused_where_they_mean_nothing(settings: list[str], named: str) -> None:
    with pytest.raises(PlanError, match=named) as refused:
        load("digits", settings)
    assert "leave" in str(refused.value) or "tiers" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_clients_with_own_seeds_send_vectors() -> None:
    assert load("digits", ["federation.seeds=own"]).outcome_kind == "vector"
    assert load("digits", ["federation.seeds=own", "secure.groups=3"]).outcome_kind == "vector"
    assert load("digits", ["federation.seeds=shared"]).outcome_kind == "scalars"


@pytest.mark.parametrize("k", [8, 9])
def test_a_tier_has_fewer_directions_than_the_plan(k: int) -> None:
    with pytest.raises(PlanError, match=rf"federation\.tiers.*below probe\.k = 8, got {k}"):
        load("digits", ["probe.k=8", f"federation.tiers=[{{k={k}, share=0.5}}]"])


def test_tiers_shares_add_up_to_at_most_one() -> None:
    with pytest.raises(PlanError, match=r"federation\.tiers.*got 1\.25"):
        load("digits", ["federation.tiers=[{k=2, share=0.75}, {k=3, share=0.5}]"])


@pytest.mark.parametrize("shares", [(1.0,), (0.75, 0.25), (0.2, 0.4, 0.3, 0.1)])
def test_tiers_may_hold_all_clients(shares: tuple[float, ...]) -> None:
    tiers = ", ".join(f"{{k={i}, share={share}}}" for i, share in enumerate(shares, 1))
    assert len(load("digits", [f"federation.tiers=[{tiers}]"]).federation.tiers) == len(shares)


@pytest.mark.parametrize(
    ("clients", "participation", "expected"), [(10, 1.0, 10), (10, 0.3, 3), (10, 0.01, 1), (3, 0.5, 2), (1, 1.0, 1)]
)
def test_clients_per_round(clients: int, participation: float, expected: int) -> None:
    assert Plan(federation=FederationSettings(clients=clients, participation=participation)).per_round == expected


def test_the_secure_sum_is_on_by_default_and_over_three_clients_at_least() -> None:
    assert Plan().secure == SecureSettings(mode="on", floor=3, threshold=0)
    for name in presets():
        assert load(name).secure.mode == ("off" if name == "digits-crowd" else "on")


def test_clients_are_stacked_in_the_plan_that_is_for_simulations_alone() -> None:
    assert [name for name in presets() if load(name).probe.stacked] == ["digits-crowd"]


@pytest.mark.parametrize(
    ("clients", "participation", "floor"), [(2, 1.0, 3), (1, 1.0, 2), (10, 0.2, 3), (10, 0.9, 10), (1000, 0.001, 2)]
)
def test_a_secure_sum_needs_as_many_clients_a_round_as_its_floor(
    clients: int, participation: float, floor: int
) -> None:
    settings = [f"federation.clients={clients}", f"federation.participation={participation}", f"secure.floor={floor}"]
    with pytest.raises(PlanError, match=rf"secure\.floor.*{floor} clients.*federation\.participation") as refused:
        load("digits", settings)
    assert "\n" not in str(refused.value)
    assert "secure.mode" in str(refused.value)
    assert load("digits", [*settings, 'secure.mode="off"']).secure.floor == floor


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["secure.groups=11"], r"secure\.groups: expected at most 10, .* got 11"),
        (["secure.groups=11", "secure.mode=off"], r"secure\.groups: expected at most 10, .* got 11"),
        (
            ["secure.groups=4", "federation.participation=0.3", "secure.mode=off"],
            r"secure\.groups: expected at most 3, ",
        ),
        (["secure.groups=4"], r"secure\.floor: expected at least 3 clients .*, got 2"),
        (["secure.groups=2", "secure.floor=6"], r"secure\.floor: expected at least 6 clients .*, got 5"),
        (["secure.groups=2", "secure.threshold=2"], r"secure\.threshold: expected 3 to 5"),
        (["secure.groups=2", "secure.threshold=6"], r"secure\.threshold: expected 3 to 5"),
        (["secure.groups=3", "secure.threshold=4"], r"secure\.threshold: expected 3 to 3"),
        (["secure.mode=malicious-server", "secure.threshold=6"], r"secure\.threshold: expected 7 to 10"),
        (["secure.mode=malicious-server", "secure.threshold=11"], r"secure\.threshold: expected 7 to 10"),
        (["secure.mode=malicious-server", "secure.groups=2", "secure.threshold=3"], r"expected 4 to 5"),
    ],
)
def test_groups_and_thresholds_with_which_no_sum_can_be_are_refused(settings: list[str], named: str) -> None:
    with pytest.raises(PlanError, match=named) as refused:
        load("digits", settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["secure.groups=3"],
        ["secure.groups=10", "secure.mode=off"],
        ["secure.groups=2", "secure.floor=5"],
        ["secure.groups=2", "secure.threshold=5"],
        ["secure.mode=malicious-server", "secure.threshold=7"],
        ["secure.mode=malicious-server", "secure.groups=2", "secure.threshold=4"],
    ],
)
def test_groups_and_thresholds_that_fit_are_taken(settings: list[str]) -> None:
    plan = load("digits", settings)
    assert sum(plan.group_sizes) in range(2 * plan.per_round // plan.secure.groups, 2 * plan.per_round + 2)


@pytest.mark.parametrize(
    ("clients", "groups", "expected"), [(10, 1, (10, 10)), (10, 3, (3, 4)), (10, 2, (5, 5)), (11, 4, (2, 3))]
)
def test_group_sizes(clients: int, groups: int, expected: tuple[int, int]) -> None:
    plan = Plan(federation=FederationSettings(clients=clients), secure=SecureSettings(groups=groups))
    assert plan.group_sizes == expected


def test_only_scalars_have_directions_of_their_own() -> None:
    own = ["secure.groups=3", "secure.group_seeds=own"]
    assert load("digits", own).own_seeds
    for other in (["secure.groups=3"], [*own, 'estimator="backprop"'], [*own, 'federation.level="epoch"']):
        assert not load("digits", other).own_seeds


@pytest.mark.parametrize(("clients", "participation", "floor"), [(3, 1.0, 3), (2, 1.0, 2), (10, 0.3, 3), (10, 1.0, 10)])
def test_a_secure_sum_over_just_its_floor_is_taken(clients: int, participation: float, floor: int) -> None:
    settings = [f"federation.clients={clients}", f"federation.participation={participation}", f"secure.floor={floor}"]
    plan = load("digits", settings)
    assert (plan.secure.mode, plan.per_round) == ("on", floor)


def test_a_plan_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        Plan().rounds = 3  # type: ignore[misc]


def test_unreadable_plans_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    for name in ("missing", "folder", "bytes", "broken"):
        with pytest.raises(PlanError, match=rf"{name}\.toml") as refused:
            load(str(tmp_path / f"{name}.toml"))
        assert "\n" not in str(refused.value)


def test_a_misspelt_preset_is_named_with_the_nearest_one() -> None:
    with pytest.raises(PlanError, match=r"'digit'.*did you mean digits\?.*paper-mnist-lenet"):
        load("digit")


@pytest.mark.parametrize("name", ["no_such_module_here:f", "math:no_such_name", "math", ":f", "math:"])
def test_a_function_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(PlanError, match=rf"{name} cannot be imported"):
        call_own("task.data", name)


def _leaves(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a plan with its type."""
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", field.type


def _other(kind: Any, value: Any) -> Any:
    """Another value of a setting."""
    if typing.get_origin(kind) is typing.Literal:
        return next((choice for choice in typing.get_args(kind) if choice != value), "another")
    match value:
        case str():
            return f"{value}2"
        case int():
            return value + 1
        case float():
            return value / 2 if value else 0.5
        case ():
            return (Tier(k=1, share=0.5),)
        case (first, *rest):
            return (_other(None, first), *rest)
    raise AssertionError(f"no other value for {kind}")


def _with_other(section: Any, path: str, kind: Any) -> Any:
    name, _, rest = path.partition(".")
    old = getattr(section, name)
    new = _with_other(old, rest, kind) if rest else _other(kind, old)
    return msgspec.structs.replace(section, **{name: new})


@pytest.mark.parametrize(("path", "kind"), list(_leaves(Plan())), ids=[path for path, _ in _leaves(Plan())])
def test_the_trajectory_digest_covers_what_determines_weights_and_nothing_else(path: str, kind: Any) -> None:
    plan = Plan()
    other = _with_other(plan, path, kind)
    assert other != plan
    assert other.digest() != plan.digest()
    moved = other.trajectory_digest() != plan.trajectory_digest()
    assert moved == (not path.startswith(NOT_OF_THE_TRAJECTORY))


def test_the_kind_of_model_is_part_of_the_trajectory() -> None:
    models: list[LeNet | Softmax | Custom] = [LeNet(), Softmax(), Custom(factory="a:b"), Custom(factory="a:c")]
    assert len({Plan(task=TaskSettings(model=model)).trajectory_digest() for model in models}) == len(models)


def test_digests_do_not_depend_on_how_a_plan_is_written() -> None:
    one = parse("rounds = 5\n[update]\nrate = 1.0\nclip = 2.0\n[probe]\nk = 3")
    other = parse("probe = {k = 3}\nupdate = {clip = 2, rate = 1}\nrounds = 5")
    assert one == other
    assert one.digest() == other.digest()
    assert one.trajectory_digest() == other.trajectory_digest()


OF_VERSION_1 = ("task.init=", "federation.batch=32", "probe.k=20", "update.rate=0.007", "update.ema=0.995")
"""What the plan `digits` of version 0.1 said."""


@pytest.mark.parametrize(
    ("plan", "digest"),
    [
        (Plan(), "3f57da93d92526e1940c74495177c5d23248700cef86cf509082cf6d1d720807"),
        (load("digits", OF_VERSION_1), "268563d5a4342484e4d331a7d8fc890e6120e9288f099a79e38c127c98c40944"),
        (load("paper-mnist-lenet"), "c3dc239a1c2c3e9d2f75718838429c2e1f7526b5ef4398be6f995302e7e87fef"),
    ],
)
def test_digests_outlive_versions(plan: Plan, digest: str) -> None:
    """A new setting whose default is what was before, and no other change, leaves every journal its plan's digest. A
    default that changes would break this silently: it needs another tag."""
    assert plan.trajectory_digest().hex() == digest


def test_the_two_digests_never_coincide() -> None:
    assert Plan().digest() != Plan().trajectory_digest()
    assert len(Plan().digest()) == len(Plan().trajectory_digest()) == 32


_counts = st.integers(1, 10**6)
_optional_counts = st.integers(0, 2**62)
_positive = st.floats(0, 1e30, exclude_min=True)
_non_negative = st.floats(0, 1e30)
_decay = st.floats(0, 1, exclude_max=True)
_activations = st.sampled_from(["hardswish", "relu", "selu", "gelu"])
_models = st.one_of(
    st.builds(
        LeNet,
        channels=st.tuples(_counts, _counts),
        head=st.sampled_from(["average", "flatten"]),
        activation=_activations,
        norm=st.sampled_from(["none", "group", "batch"]),
    ),
    st.just(Softmax()),
    st.builds(Custom, factory=st.text()),
)


def _sound(plan: Plan) -> Plan:
    """The same plan, without a secure sum if it has too few clients for one."""
    if plan.per_round >= plan.secure.floor:
        return plan
    return msgspec.structs.replace(plan, secure=msgspec.structs.replace(plan.secure, mode="off"))


_plans = st.builds(
    Plan,
    name=st.text(),
    seed=st.integers(0, 2**63 - 1),
    rounds=_counts,
    task=st.builds(TaskSettings, data=st.text(), pixels=st.integers(0, 1024), augment=st.booleans(), model=_models),
    federation=st.builds(
        FederationSettings,
        clients=_counts,
        participation=st.floats(0, 1, exclude_min=True),
        partition=st.sampled_from(["iid", "dirichlet", "domain", "writer"]),
        alpha=_positive,
        floor_samples=_counts,
        batch=_optional_counts,
        epochs=_counts,
        weighting=st.sampled_from(["samples", "uniform"]),
        tiers=st.lists(st.builds(Tier, k=st.integers(1, 7), share=st.floats(0.01, 0.25)), max_size=3).map(tuple),
        dropout=_decay,
    ),
    probe=st.builds(
        ProbeSettings,
        k=st.integers(8, 10**6),
        sigma=_positive,
        scheme=st.sampled_from(["forward", "central"]),
        distribution=st.sampled_from(["gaussian", "rademacher"]),
        micro_batch=_optional_counts,
    ),
    update=st.builds(
        UpdateSettings,
        optimizer=st.sampled_from(["adam", "momentum", "sgd"]),
        rate=_positive,
        betas=st.tuples(_decay, _decay),
        momentum=_decay,
        weight_decay=_non_negative,
        clip=_non_negative,
        ema=_decay,
    ),
    ring=st.builds(RingSettings, d_max=_positive, update_max=_positive, n_max=_optional_counts),
    run=st.builds(
        RunSettings,
        downlink=st.sampled_from(["scalars", "delta", "weights"]),
        workers=_optional_counts,
        evaluate_every=_counts,
        commit_seconds=_non_negative,
    ),
    secure=st.builds(SecureSettings, mode=st.sampled_from(["on", "off"]), floor=st.integers(2, 10**6)),
).map(_sound)


@settings(max_examples=150)
@given(_plans)
def test_a_plan_survives_the_way_through_toml(plan: Plan) -> None:
    again = parse(plan.to_toml())
    assert again == plan
    assert again.digest() == plan.digest()
    assert again.trajectory_digest() == plan.trajectory_digest()
    assert build(msgspec.to_builtins(plan)) == plan


def test_half_precision_is_for_whole_forward_passes() -> None:
    assert load("digits", ["probe.precision=float16"]).probe.precision == "float16"
    assert load("digits", ["probe.precision=float16", "probe.supports=layers"]).probe.precision == "float16"
    with pytest.raises(PlanError, match=r"probe\.precision: only whole forward passes.*bfloat16.*supports"):
        load("digits", ["probe.precision=bfloat16", "probe.supports=units"])
