"""Plans: what they accept, what they refuse and how they say so, and what their two digests cover."""

import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec import inspect

import baffle
from baffle.errors import PlanError
from baffle.plan import (
    WRN,
    Custom,
    FederationSettings,
    LeNet,
    Plan,
    ProbeSettings,
    RingSettings,
    Section,
    SecureSettings,
    Softmax,
    TaskSettings,
    Tier,
    change,
    load,
    override,
    parse,
    presets,
    settings_of,
)
from baffle.plan.functions import call_own

NOT_OF_THE_TRAJECTORY = (
    *("name", "rounds", "run.", "secure.mode", "secure.floor", "secure.threshold", "secure.liars"),
    *("privacy.epsilon", "privacy.delta"),
)


def test_every_preset_file_is_listed_loads_and_is_called_by_its_name() -> None:
    files = sorted(path.stem for path in (Path(baffle.__file__).parent / "plans").glob("*.toml"))
    assert presets() == files
    assert {"digits", "paper-mnist-lenet"} <= set(files)
    for name in files:
        plan = load(name)
        assert plan.name == name
        assert plan.secure.mode == ("off" if name == "digits-crowd" else "on")
        assert plan.probe.stacked == (name == "digits-crowd")  # which is for simulations alone
    assert load() == load("digits-head") == load("digits", ["name=digits-head", "probe.head=exact"])
    assert Plan().secure == SecureSettings(mode="on", floor=3, threshold=0)


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
        ("name = two words ", "two words"),
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


@pytest.mark.parametrize(
    "settings",
    [
        {"probe.k": 50, "update.rate": 0.5, "update.betas": [0.5, 0.75], "task.augment": False},
        {"probe": {"k": 50}, "update": {"rate": 0.5, "betas": (0.5, 0.75)}},
        {"probe.k": np.int64(50), "update.rate": np.float32(0.5), "update.betas": np.array([0.5, 0.75])},
        {"probe": {"k": np.uint8(50)}, "update": {"rate": np.float64(0.5)}, "update.betas": [np.float32(0.5), 0.75]},
        {"probe.k": 50, "update.rate": 0.5, "update.betas": [0.5, 0.75], "task.augment": np.False_},
    ],
)
def test_settings_are_the_same_plan_in_every_form(settings: Mapping[str, Any]) -> None:
    assert load("digits", settings) == load("digits", ["probe.k=50", "update.rate=0.5", "update.betas=[0.5, 0.75]"])


def test_a_table_replaces_a_model_and_changes_a_section() -> None:
    plan = load("digits", {"task": {"model": {"name": "wrn"}, "loss": "cross_entropy"}})
    assert plan.task.model == WRN()
    assert plan.task.data == load("digits").task.data
    with pytest.raises(PlanError, match=r"a list of them, as \['probe\.k=3'\], got one text"):
        load("digits", "probe.k=3")


def test_later_settings_win_and_settings_may_open_a_section() -> None:
    plan = parse("", ["probe.k=5", "probe.k=7", "ring.d_max=3"])
    assert plan == Plan(probe=ProbeSettings(k=7), ring=RingSettings(d_max=3.0))
    assert change(plan, ["rounds=2"]) == msgspec.structs.replace(plan, rounds=2)


def refusal(settings: list[str]) -> str:
    """The error of a plan `digits` with these settings."""
    with pytest.raises(PlanError) as refused:
        load("digits", settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        *((setting, r"has the form section\.key=value") for setting in ("nothing", "=3", " =3", "")),
        *((f"{key}=3", "is a value, not a table") for key in ("probe.k.x", "name.x.y", "federation.batch.k")),
        ("probe.sigm=1", r"unknown key probe\.sigm \(did you mean probe\.sigma\?\)"),
        ("prob.k=3", r"prob \(did you mean probe\?\)"),
        ("federation.client=3", r"federation\.client \(did you mean federation\.clients\?\)"),
        ("update.learning_rate=3", r"unknown key update\.learning_rate"),
        ("round=3", r"round \(did you mean rounds\?\)"),
        ("task.model.channel=[1, 2]", r"task\.model\.channel \(did you mean task\.model\.channels\?\)"),
        ("run.worker=3", r"run\.worker \(did you mean run\.workers\?\)"),
        ("secure.flor=3", r"secure\.flor \(did you mean secure\.floor\?\)"),
        ("federation.dropouts=0.1", r"federation\.dropouts \(did you mean federation\.dropout\?\)"),
        ("federation.tiers=[{k=2, shar=0.5}]", r"shar \(did you mean \S*share\?\)"),
    ],
)
def test_a_setting_that_no_plan_has_is_refused_with_the_nearest_valid_one(setting: str, words: str) -> None:
    assert re.search(words, refusal([setting]))


OUT_OF_RANGE = {
    "0": "probe.k probe.sigma federation.clients federation.participation federation.alpha federation.floor_samples "
    "federation.epochs update.rate ring.d_max secure.groups run.evaluate_every run.snapshot_every rounds",
    "-1": "probe.k probe.micro_batch federation.batch task.pixels update.clip update.norm_max ring.update_max "
    "secure.threshold run.commit_seconds seed",
    "1": "federation.dropout task.augment update.ema secure.floor",
    "-0.1": "probe.sigma federation.dropout update.weight_decay",
    "1.5": "probe.k federation.participation",
    "2.5": "secure.floor",
    "nan": "probe.sigma federation.alpha",
    "inf": "probe.sigma update.rate ring.d_max ring.update_max",
    "1e+39": "update.rate update.weight_decay update.clip",
    "true": "probe.k secure.mode",
    "sideways": "probe.k probe.scheme federation.clients federation.partition federation.level update.optimizer "
    "secure.mode secure.group_seeds secure.combine run.downlink task.model.name task.model.activation",
    "5": "probe name",
    "1025": "task.pixels",
    "1000001": "probe.k",
    "9223372036854775808": "seed",
    "[0.9]": "update.betas",
}
"""Values that some keys do not take."""

INSIDE_A_LIST = [
    ("federation.tiers=[{k=0, share=0.5}]", "federation.tiers", "0"),
    ("federation.tiers=[{k=1, share=0}]", "federation.tiers", "0"),
    ("update.betas=[0.9, 1.0]", "update.betas", "1.0"),
    ("task.model.channels=[0, 3]", "task.model.channels", "0"),
]


def _refused_values() -> Iterator[tuple[str, str, str]]:
    """A setting, its key, and its value as Python shows it."""
    for value, keys in OUT_OF_RANGE.items():
        for key in keys.split():
            yield f"{key}={value}", key, value.title() if value == "true" else value


@pytest.mark.parametrize(("setting", "key", "value"), [*_refused_values(), *INSIDE_A_LIST])
def test_a_value_out_of_range_or_of_the_wrong_type_is_named_with_its_key(setting: str, key: str, value: str) -> None:
    message = refusal([setting])
    assert message.startswith(key)
    assert value in message.partition(":")[2]
    assert "`" not in message


TIER = "federation.tiers=[{k=2, share=0.5}]"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["task.model={}"], r"task\.model.*name"),
        (['task.model={name="custom"}'], r"task\.model.*factory"),
        ([TIER, "federation.level=epoch"], r"federation\.tiers need level"),
        ([TIER, "estimator=backprop"], r"federation\.tiers need .*estimator"),
        ([TIER, "federation.seeds=own"], r"federation\.tiers need .*seeds"),
        (["federation.tiers=[{k=8, share=0.5}]", "probe.k=8"], r"federation\.tiers.*below probe\.k = 8, got 8"),
        (["federation.tiers=[{k=2, share=0.75}, {k=3, share=0.5}]"], r"federation\.tiers.*got 1\.25"),
        (["federation.seeds=own", "estimator=backprop"], r'seeds.*estimator = "probe", got "backprop".*leave'),
        (["federation.seeds=own", "federation.level=epoch"], r'seeds.*level = "batch", got "epoch".*leave'),
        (["federation.seeds=own", "secure.groups=3", "secure.group_seeds=own"], r"seeds.*group_seeds.*leave"),
        (["federation.steps=3"], r'federation\.steps.*level = "epoch", got "batch".*leave'),
        (["federation.steps=3", "federation.epochs=2", "federation.level=epoch"], r"steps = 3.*epochs = 2.*leave"),
        (["secure.groups=11"], r"secure\.groups: expected at most 10, .* got 11"),
        (["secure.groups=4", "federation.participation=0.3", "secure.mode=off"], r"groups: expected at most 3, "),
        (["secure.groups=4"], r"secure\.floor: expected at least 3 clients .*, got 2"),
        (["secure.groups=2", "secure.floor=6"], r"secure\.floor: expected at least 6 clients .*, got 5"),
        (["secure.liars=1"], r'secure\.liars: only secure\.mode = "malicious-server" .*, got "on"; leave one'),
        (["secure.mode=malicious-server", "secure.liars=4"], r"liars: expected at most 3, .* 10 clients, got 4"),
        (["secure.mode=malicious-server", "secure.liars=1", "secure.threshold=5"], r"threshold: expected 6 to 10"),
        (["secure.groups=2", "secure.threshold=2"], r"secure\.threshold: expected 3 to 5"),
        (["secure.groups=2", "secure.threshold=6"], r"secure\.threshold: expected 3 to 5"),
        (["secure.groups=3", "secure.threshold=4"], r"secure\.threshold: expected 3 to 3"),
        (["secure.mode=malicious-server", "secure.threshold=6"], r"secure\.threshold: expected 7 to 10"),
        (["secure.mode=malicious-server", "secure.threshold=11"], r"secure\.threshold: expected 7 to 10"),
        (["secure.mode=malicious-server", "secure.groups=2", "secure.threshold=3"], r"expected 4 to 5"),
        (["probe.k=4", "probe.supports=units", "probe.layout=[[200, 300, 0, 100, 4]]"], r"layout: every row .* tail"),
        (["probe.precision=bfloat16", "probe.supports=units"], r"probe\.precision: only whole.*bfloat16.*supports"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: list[str], words: str) -> None:
    assert re.search(words, refusal(settings))


@pytest.mark.parametrize(
    "settings",
    [
        ["federation.tiers=[{k=1, share=0.2}, {k=2, share=0.4}, {k=3, share=0.3}, {k=4, share=0.1}]"],
        ["secure.groups=3"],
        ["secure.groups=10", "secure.mode=off"],
        ["secure.groups=2", "secure.floor=5"],
        ["secure.groups=2", "secure.threshold=5"],
        ["secure.mode=malicious-server", "secure.threshold=7"],
        ["secure.mode=malicious-server", "secure.groups=2", "secure.threshold=4"],
        ["probe.precision=float16"],
        ["probe.precision=float16", "probe.supports=layers"],
    ],
)
def test_settings_at_the_edge_of_what_fits_are_taken(settings: list[str]) -> None:
    plan = load("digits", settings)
    assert sum(plan.group_sizes) in range(2 * plan.per_round // plan.secure.groups, 2 * plan.per_round + 2)


@pytest.mark.parametrize(
    ("clients", "participation", "groups", "per_round", "sizes"),
    [(10, 1.0, 3, 10, (3, 4)), (10, 0.3, 1, 3, (3, 3)), (10, 0.01, 1, 1, (1, 1)), (3, 0.5, 1, 2, (2, 2))],
)
def test_clients_and_groups_of_a_round(
    clients: int, participation: float, groups: int, per_round: int, sizes: tuple[int, int]
) -> None:
    federation = FederationSettings(clients=clients, participation=participation)
    plan = Plan(federation=federation, secure=SecureSettings(groups=groups))
    assert (plan.per_round, plan.group_sizes) == (per_round, sizes)


@pytest.mark.parametrize(
    ("clients", "participation", "floor"), [(2, 1.0, 3), (1, 1.0, 2), (10, 0.2, 3), (10, 0.9, 10), (1000, 0.001, 2)]
)
def test_a_secure_sum_needs_as_many_clients_a_round_as_its_floor(
    clients: int, participation: float, floor: int
) -> None:
    settings = [f"federation.clients={clients}", f"federation.participation={participation}", f"secure.floor={floor}"]
    assert re.search(rf"secure\.floor.*{floor} clients.*federation\.participation.*secure\.mode", refusal(settings))
    assert load("digits", [*settings, f"federation.clients={floor}", "federation.participation=1"]).secure.mode == "on"
    assert load("digits", [*settings, 'secure.mode="off"']).secure.floor == floor


def test_only_scalars_have_directions_of_their_own() -> None:
    own = ["secure.groups=3", "secure.group_seeds=own"]
    assert load("digits", own).own_seeds
    assert load("digits", ["federation.seeds=own"]).outcome_kind == "vector"
    for other in (["secure.groups=3"], [*own, 'estimator="backprop"'], [*own, 'federation.level="epoch"']):
        assert not load("digits", other).own_seeds


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
    assert (one.digest(), one.trajectory_digest()) == (other.digest(), other.trajectory_digest())


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


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value that a setting of this type takes on its own."""
    match kind:
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _values(field.type) for field in fields})
        case inspect.UnionType(types=types):
            return st.one_of([_values(one) for one in types])
        case inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
        case inspect.IntType(ge=least, le=most):
            return st.integers(least, most)
        case inspect.FloatType(gt=above, ge=least, lt=below, le=most):
            low, high = (above if least is None else least), (below if most is None else most)
            return st.floats(low, high, allow_nan=False, exclude_min=above is not None, exclude_max=below is not None)
        case inspect.TupleType(item_types=types):
            return st.tuples(*map(_values, types))
        case inspect.VarTupleType(item_type=item):
            return st.lists(_values(item), max_size=3).map(tuple)
        case inspect.StrType(pattern=pattern):
            return st.text() if pattern is None else st.just("")
        case _:
            return st.booleans()


@settings(max_examples=150)
@given(_values(inspect.type_info(Plan)))
def test_a_plan_survives_the_way_through_toml(plan: Plan) -> None:
    again = override(plan, [])
    assert again == plan == settings_of(msgspec.to_builtins(plan), Plan)
    assert (again.digest(), again.trajectory_digest()) == (plan.digest(), plan.trajectory_digest())
