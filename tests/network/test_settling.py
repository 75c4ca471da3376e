"""What a server settles before it asks anybody, and the plans whose promises would not hold."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, reject, strategies as st

from baffle.errors import PlanError
from baffle.network import settling
from baffle.network.settling import N_MAX, differences, require_hidden_tiers, require_sound_terms, tiers_for
from baffle.plan import Plan, change, load
from baffle.schedule import tiers_of
from tests.support.lines_in_memory import Federation, new_keys

TIERED = "federation.tiers=[{k=1, share=0.25}, {k=3, share=0.25}]"


@pytest.fixture
def four(tiny: Callable[..., Plan]) -> Plan:
    return tiny('secure.mode="on"', "federation.clients=4", "secure.floor=2")


def test_a_client_evaluates_what_the_plan_gives_it_or_a_lower_tier(four: Plan) -> None:
    assert tiers_for(four, {}) == tiers_for(four, dict.fromkeys(range(4), 0)) == (4, 4, 4, 4)
    assert tiers_for(four, {0: 3, 1: 4, 2: 9}) == (4, 4, 4, 4)  # the plan declares no lower one: client 0 will refuse
    tiered = change(four, [TIERED])
    given = tuple(tiers_of(tiered))
    assert sorted(given) == [1, 3, 4, 4]
    assert tiers_for(tiered, {}) == given
    assert tiers_for(tiered, dict.fromkeys(range(4), 9)) == given  # nobody gets more than the plan gives it
    assert tiers_for(tiered, dict.fromkeys(range(4), 3)) == tuple(min(k, 3) for k in given)
    assert tiers_for(tiered, dict.fromkeys(range(4), 2)) == (1, 1, 1, 1)
    twice = change(tiered, ["federation.local_steps=2"])  # what a client affords in a round is for both steps
    assert tiers_for(twice, dict.fromkeys(range(4), 7)) == tuple(min(k, 3) for k in given)


@given(st.dictionaries(st.integers(0, 3), st.integers(0, 6)))
def test_what_one_client_affords_changes_nothing_for_the_others(affords: dict[int, int]) -> None:
    plan = load("digits", ["federation.clients=4", "probe.k=4", TIERED])
    whole = tiers_for(plan, affords)
    for client in range(4):
        alone = tiers_for(plan, {client: affords[client]} if client in affords else {})
        assert whole[client] == alone[client]
        assert whole[client] in (1, 3, 4)


@pytest.mark.parametrize("setting", ['federation.level="epoch"', 'estimator="backprop"'])
def test_where_there_are_no_directions_nobody_evaluates_fewer(four: Plan, setting: str) -> None:
    plan = change(four, [setting])
    assert tiers_for(plan, dict.fromkeys(range(4), 1)) == tuple(tiers_of(plan))


def test_without_n_max_the_server_says_how_much_a_client_counts(tiny: Callable[..., Plan], tmp_path: Path) -> None:
    keys = new_keys(tmp_path, 3)
    for weighting, n_max, expected in (("samples", 0, N_MAX), ("samples", 77, 77), ("uniform", 0, 1)):
        plan = tiny('secure.mode="on"', "rounds=1", f'federation.weighting="{weighting}"', f"ring.n_max={n_max}")
        federation = Federation(keys, tmp_path / f"{weighting}-{n_max}", plan)
        federation.serve(federation.lines(3))
        assert load(str(federation.run / "plan.toml")).ring.n_max == expected
        said = federation.said(f"counts as if it had {N_MAX:,}")
        assert said == (weighting == "samples" and n_max == 0)


UNIFORM = "federation.weighting=uniform"
LYING = 'secure.mode="malicious-server"'
PRIVATE = ("federation.weighting=uniform", "privacy.clip=1.0", "privacy.epsilon=20")


def risk_by_counting(clients: int, size: int, liars: int) -> float:
    """The probability that a third of a sum's clients or more lie, by looking at every possible sum."""
    sums = list(combinations(range(clients), size))
    return sum(3 * sum(client < liars for client in chosen) >= size for chosen in sums) / len(sums)


@pytest.mark.parametrize(("clients", "participation"), [(9, 0.67), (12, 0.5)])
def test_the_risk_is_the_hypergeometric_tail(tiny: Callable[..., Plan], clients: int, participation: float) -> None:
    plan = tiny(
        LYING, UNIFORM, f"federation.clients={clients}", f"federation.participation={participation}", "rounds=1"
    )
    liars = (clients - 1) // 3  # the most that are fewer than a third
    expected = risk_by_counting(clients, plan.per_round, liars)
    assert settling._risk(plan) == pytest.approx(expected)
    many = change(plan, ["rounds=1000"])
    assert settling._risk(many) == pytest.approx(min(1.0, 1000 * expected))


def test_a_plan_in_which_chance_gathers_too_many_liars_is_refused(tiny: Callable[..., Plan]) -> None:
    require_sound_terms(tiny(LYING, UNIFORM, "federation.clients=9", "rounds=1000"))  # everybody is in every sum
    few = tiny(LYING, UNIFORM, "federation.clients=12", "federation.participation=0.5")
    with pytest.raises(PlanError) as refused:
        require_sound_terms(few)
    assert "With 6 of 12 clients in a sum and 6 rounds" in str(refused.value)
    assert "use fewer secure.groups, or federation.participation = 1" in str(refused.value)
    grouped = tiny(LYING, UNIFORM, "federation.clients=12", "secure.groups=2", "secure.floor=3")
    with pytest.raises(PlanError, match="With 6 of 12 clients"):
        require_sound_terms(grouped)
    for mode in ("on", "off"):
        require_sound_terms(change(few, [f'secure.mode="{mode}"']))


def test_fewer_liars_allow_smaller_groups(tiny: Callable[..., Plan]) -> None:
    """One of ten is never more than one of five. Two may meet, which is more than a sum of five stands."""
    grouped = tiny(LYING, UNIFORM, "federation.clients=10", "secure.groups=2", "secure.floor=3")
    with pytest.raises(PlanError, match=r"or say with secure\.liars that fewer clients lie"):
        require_sound_terms(grouped)
    require_sound_terms(change(grouped, ["secure.liars=1"]))
    with pytest.raises(PlanError, match="more of them in one with probability"):
        require_sound_terms(change(grouped, ["secure.liars=2"]))
    uneven = tiny(LYING, UNIFORM, "federation.clients=7", "secure.groups=2", "secure.floor=3", "secure.liars=1")
    with pytest.raises(PlanError, match="With 3 of 7 clients"):  # a sum of three stands no liar
        require_sound_terms(uneven)


def test_a_sum_without_everybody_is_sound_where_no_draw_can_gather_too_many_liars(tiny: Callable[..., Plan]) -> None:
    """Of 900 clients 299 may lie, and a third of a sum of 899 is 300."""
    plan = tiny(LYING, UNIFORM, "federation.clients=900", "federation.participation=0.999", "rounds=100000")
    assert plan.per_round == 899
    assert settling._risk(plan) == 0
    require_sound_terms(plan)


def test_if_a_server_may_lie_all_clients_count_the_same(tiny: Callable[..., Plan]) -> None:
    with pytest.raises(
        PlanError, match=r'federation.weighting = "samples" does not.*set federation.weighting = "uniform"'
    ):
        require_sound_terms(tiny(LYING))
    require_sound_terms(tiny(LYING, UNIFORM))
    require_sound_terms(tiny('secure.mode="on"'))


@pytest.mark.parametrize("downlink", ["delta", "weights"])
def test_a_server_that_may_lie_sends_no_weights_that_are_unchecked(tiny: Callable[..., Plan], downlink: str) -> None:
    plan = tiny(LYING, UNIFORM, f'run.downlink="{downlink}"', "update.ema=0")
    with pytest.raises(PlanError, match=f'run.downlink = "{downlink}" does not go with .*set run.downlink = "scalars"'):
        require_sound_terms(plan)
    require_sound_terms(change(plan, ['secure.mode="on"']))


def test_a_tier_whose_last_directions_would_be_seen_is_refused(four: Plan) -> None:
    require_hidden_tiers(four)
    require_hidden_tiers(change(four, [TIERED]))  # two of four evaluate all directions
    few = change(four, ["federation.tiers=[{k=2, share=0.75}]"])
    with pytest.raises(PlanError, match=r"only 1 of 4 clients evaluate all 4 directions.* secure\.floor = 2"):
        require_hidden_tiers(few)
    require_hidden_tiers(change(few, ['secure.mode="off"']))
    require_hidden_tiers(change(four, ["federation.tiers=[{k=2, share=1.0}]"]))  # nobody evaluates more than two


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["probe.stacked=true"], r"probe\.stacked: each client of a network has a machine of its own; leave it"),
        (["task.validation=true"], r"task\.validation: a server holds no training samples to test on; leave it out"),
        ([LYING, UNIFORM, "federation.participation=0.5"], "promises to hold"),
        ([LYING], r"federation\.weighting = \"samples\" does not go"),
        (["federation.tiers=[{k=2, share=0.9}]"], "give the lower tiers smaller shares"),
        ([*PRIVATE, 'secure.mode="off"'], r"voids \[privacy\] in a network"),
    ],
)
def test_a_server_refuses_a_plan_before_it_makes_a_folder(
    tiny: Callable[..., Plan], tmp_path: Path, settings: list[str], reason: str
) -> None:
    plan = tiny('secure.mode="on"', "federation.clients=12", *settings)
    federation = Federation(new_keys(tmp_path, 12), tmp_path, plan)
    with pytest.raises(PlanError, match=reason):
        federation.serve(federation.lines(0))
    assert not federation.run.exists()


# Which plans are the same as a run's, and in which words the others differ

SETTINGS = (
    *("name=other", "rounds=7", "run.workers=3", "seed=9", "estimator=backprop", "task.augment=true"),
    *("task.model.norm=group", 'task.model={name="softmax"}', "federation.batch=5", "probe.k=21", "probe.sigma=0.5"),
    *("federation.tiers=[{k=2, share=0.5}]", "update.betas=[0.5, 0.5]", "ring.n_max=5", "secure.floor=4"),
    *("secure.mode=malicious-server", "secure.groups=2"),
)
SETTLED = change(load("digits"), ["ring.n_max=9", "probe.micro_batch=8", "federation.tiers=[{k=1, share=0.5}]"])


@given(st.lists(st.sampled_from(SETTINGS), max_size=4, unique_by=lambda setting: setting.partition("=")[0][:10]))
def test_plans_are_the_same_if_their_trajectory_and_their_secure_settings_are(settings: list[str]) -> None:
    run = change(load("digits"), ["ring.n_max=9", "probe.micro_batch=8"])
    try:
        other = change(run, settings)
    except PlanError:
        reject()  # these settings do not go together
    same = other.trajectory_digest() == run.trajectory_digest() and other.secure == run.secure
    assert (differences(other, run) == "") is same


def test_a_plan_may_leave_the_layers_to_the_run() -> None:
    given = change(load("digits"), ["update.moments=layers"])
    settled = change(given, ["update.layers=[[0, 5994, 0, 0]]", "ring.n_max=9", "probe.micro_batch=8"])
    assert differences(given, settled) == ""


def test_a_plan_may_leave_the_shapes_of_tensors_to_the_run() -> None:
    given = change(load("digits"), ["probe.distribution=outer"])
    settled = change(given, ["probe.shapes=[[5994]]", "ring.n_max=9", "probe.micro_batch=8"])
    assert differences(given, settled) == ""
    other = change(settled, ["probe.shapes=[[2, 2997]]"])
    assert differences(other, settled) == "probe.shapes is [[5994]] there and [[2,2997]] here"


def test_a_plan_may_leave_open_what_a_run_settles() -> None:
    assert differences(load("digits"), SETTLED) == ""
    assert differences(SETTLED, load("digits")).startswith("federation.tiers is [] there and [{")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["probe.k=50"], "probe.k is 20 there and 50 here"),
        (["task.model={name='softmax'}"], 'task.model.name is "lenet" there and "softmax" here'),
        (["secure.mode=malicious-server"], 'secure.mode is "on" there and "malicious-server" here'),
        (
            ["seed=1", "probe.k=50", "update.clip=1", "update.ema=0.5", "secure.floor=4"],
            "probe.k is 20 there and 50 here, secure.floor is 3 there and 4 here, seed is 0 there and 1 here, and 2 "
            "more",
        ),
    ],
)
def test_the_first_few_differences_are_named_with_both_values(settings: list[str], words: str) -> None:
    run = change(SETTLED, ["probe.k=20"])
    assert differences(change(run, settings), run) == words


def test_a_long_value_is_cut(tiny: Callable[..., Plan]) -> None:
    said = differences(tiny(f'task.data="{"x" * 5000}:f"'), tiny())
    assert said.startswith('task.data is "digits" there and "xxx')
    assert len(said) < 200
