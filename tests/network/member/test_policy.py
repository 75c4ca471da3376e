"""What a client's policy allows and refuses, and how it is read."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from baffle.errors import PlanError, RefusalError
from baffle.network.member.policy import POLICY_BYTES, Policy, load_policy
from baffle.plan import FederationSettings, Plan, change, load, presets
from baffle.privacy.accounting import Budget

PAGE = Path(__file__).parents[3] / "docs" / "policy.md"
USUAL = load("digits")


def changed(*settings: str) -> Plan:
    return change(USUAL, settings)


def test_the_usual_plans_are_within_the_defaults() -> None:
    for name in presets():
        plan = load(name)
        refused = Policy().refusals(plan)
        for_networks = plan.outcome_kind == "scalars" and not plan.probe.stacked
        assert bool(refused) != for_networks, (name, refused)
    assert Policy().refusals(load(str(Path(__file__).parents[3] / "deploy" / "plan.toml"))) == []
    assert Policy().refusals(USUAL) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (['secure.mode="off"'], 'secure.mode is "off" in the server\'s plan, mode asks for at least "on"'),
        (["secure.floor=2"], "secure.floor is 2 in the server's plan, floor asks for at least 3"),
        (['federation.level="epoch"'], "clients send vectors"),
        (['federation.seeds="own"'], 'federation.seeds = "own"'),
        (['estimator="backprop"'], 'estimator = "backprop"'),
        (["federation.batch=7"], "so a round uses 7 samples; least_batch asks for at least 8"),
        (["federation.batch=0"], "is 0 in the server's plan, so a round uses all samples; largest_batch allows 0.5"),
        (['task.model={name="wrn", widen=100}'], "weights is 7.4016e+08 in the server's plan, most_weights allows"),
        (["probe.k=10001"], "probe.k is 10001 in the server's plan, most_k allows at most 10000"),
        (["probe.k=101", "federation.local_steps=100"], "probe.k times federation.local_steps is 10100"),
        (["probe.sigma=1e-7"], "probe.sigma is 1e-07 in the server's plan, sigma allows 1e-06 to 0.1"),
        (["probe.sigma=0.2"], "probe.sigma is 0.2"),
        (["ring.d_max=1e-300"], "ring.d_max is 1e-300 in the server's plan, d_max allows 0.01 to 10000"),
        (["ring.d_max=1e5"], "ring.d_max is 100000"),
        (["update.rate=1.5"], "update.rate is 1.5 in the server's plan, most_rate allows at most 1"),
        (["rounds=10001"], "rounds is 10001 in the server's plan, most_rounds allows at most 10000"),
        (["run.deadline_seconds=3601"], "is 3601 in the server's plan, most_seconds allows at most"),
        (["task.data=os:getcwd"], "task.data is 'os:getcwd' in the server's plan, data allows digits, mnist"),
        (['task.model={name="custom", factory="os:getcwd"}'], "task.model comes from a function outside BAFFLE"),
        (['task.loss="os:getcwd"'], "task.loss comes from a function outside BAFFLE"),
        (['task.metrics=["top5", "os:getcwd"]'], "task.metrics comes from a function outside BAFFLE"),
        (
            ['secure.mode="malicious-server"', "secure.liars=1"],
            "secure.liars is 1 in the server's plan, least_liars asks for at least 3 of 10 clients",
        ),
        (['secure.mode="malicious-server"'], 'no [privacy], secure.mode = "malicious-server" asks for it'),
    ],
)
def test_a_plan_beyond_a_bound_is_refused_with_what_is_allowed(settings: list[str], sentence: str) -> None:
    plan = changed(*settings)
    refusals = Policy().refusals(plan)
    assert any(sentence in refusal for refusal in refusals), refusals
    with pytest.raises(RefusalError, match=f"^this client's policy: .*{re.escape(sentence)}"):
        Policy().require(plan)


@pytest.mark.parametrize(
    "settings",
    [
        ["federation.batch=8", "probe.sigma=1e-6", "secure.floor=4"],
        ['secure.mode="malicious-server"', "federation.weighting=uniform", "privacy={noise=5.0, clip=1.0}"],
        ["federation.batch=1000", "probe.sigma=0.1", "probe.k=10000", "rounds=10000", "run.deadline_seconds=3600"],
        ["ring.d_max=0.01", "update.rate=1.0"],
    ],
)
def test_a_plan_at_its_bounds_is_within_them(settings: list[str]) -> None:
    assert Policy().refusals(changed(*settings)) == []


@given(
    samples=st.integers(0, 300),
    batch=st.integers(1, 300),
    steps=st.integers(0, 9),
    least=st.integers(0, 40),
    share=st.floats(0.01, 1.0),
)
def test_a_client_uses_few_enough_samples_or_none(
    samples: int, batch: int, steps: int, least: int, share: float
) -> None:
    """No plan is refused because of them. At batch level `steps` is 0."""
    federation = FederationSettings(batch=batch, steps=steps, level="epoch" if steps else "batch")
    used = Policy(least_batch=least, largest_batch=share).batch(Plan(federation=federation), samples)
    most = int(share * samples)
    assert used <= min(batch, samples)
    assert min((steps or 1) * used, samples) <= most
    if used:
        assert used in (batch, samples) or (steps or 1) * (used + 1) > most
        assert min((steps or 1) * used, samples) >= least
    if not steps:
        assert (used > 0) == (min(batch, most) >= max(least, 1))


def plan_of(**federation: Any) -> Plan:
    return Plan(federation=FederationSettings(**federation))


def test_who_has_enough_samples_uses_as_many_as_the_plan_says() -> None:
    assert Policy().batch(plan_of(batch=32), 1000) == 32
    assert Policy().batch(plan_of(batch=32), 40) == 20
    assert Policy().batch(plan_of(batch=8), 16) == 8
    assert Policy().batch(plan_of(batch=8), 15) == 0
    whole = Policy(largest_batch=1.0)
    assert whole.batch(plan_of(batch=0), 40) == 40
    assert whole.batch(plan_of(batch=4, level="epoch"), 40) == 4


def test_at_epoch_level_a_round_uses_all_samples_or_those_of_its_steps() -> None:
    policy = Policy(scalars_only=False)
    epoch = ['federation.level="epoch"', "federation.batch=3"]
    assert "a round uses all samples" in policy.refusals(changed(*epoch))[0]
    assert policy.refusals(changed(*epoch, "federation.steps=3")) == []
    assert "a round uses 6 samples" in policy.refusals(changed(*epoch, "federation.steps=2"))[0]


def test_an_owner_may_ask_for_scalars_alone() -> None:
    exact = changed("probe.head=exact")
    assert Policy().refusals(exact) == []
    (words,) = Policy(exact_head=False).refusals(exact)
    assert 'probe.head is "exact" in the server\'s plan' in words
    assert Policy(exact_head=False).refusals(USUAL) == []


def test_a_function_that_the_policy_names_may_be_called_and_no_other() -> None:
    policy = Policy(data=("own:data",))
    assert policy.refusals(changed("task.data=own:data")) == []
    assert policy.refusals(changed("task.data=other:data"))
    assert policy.refusals(USUAL)
    assert policy.refusals(USUAL, named=True) == []


def test_where_the_server_may_lie_the_budget_is_eight_unless_the_policy_says_otherwise() -> None:
    lying = changed('secure.mode="malicious-server"', "federation.weighting=uniform", "privacy={noise=5.0, clip=1.0}")
    assert Policy().budget(lying) == Budget(8.0, 1e-5)
    assert Policy(most_epsilon=20.0, delta=1e-6).budget(lying) == Budget(20.0, 1e-6)
    assert Policy().budget(USUAL) is None
    assert Policy(most_epsilon=2.0).budget(USUAL) == Budget(2.0, 1e-5)


def test_beside_a_plan_without_privacy_batches_stay_below_all_samples_where_the_server_may_lie() -> None:
    lying = changed('secure.mode="malicious-server"')
    assert Policy.beside(lying).refusals(lying, named=True) == []
    assert Policy.beside(lying).batch(lying, 8) == Policy(least_batch=0, largest_batch=1.0).batch(lying, 8) == 4
    assert Policy.beside(USUAL).batch(USUAL, 8) == 8


def test_modes_are_ordered() -> None:
    modes = ("off", "on", "malicious-server")
    for least, mine in enumerate(modes):
        for asked, theirs in enumerate(modes):
            policy = Policy(mode=mine, without_privacy=True)  # type: ignore[arg-type]
            refused = policy.refusals(changed(f'secure.mode="{theirs}"'))
            assert bool(refused) == (asked < least)


def test_the_page_shows_the_whole_file_with_the_defaults(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert set(tomllib.loads(example)) == {field.name for field in msgspec.structs.fields(Policy)}
    (tmp_path / "policy.toml").write_text(example)
    assert load_policy(tmp_path / "policy.toml") == Policy()
    # What a file leaves out has its default
    (tmp_path / "policy.toml").write_text('mode = "malicious-server"\nsigma = [1e-4, 1e-2]\ndata = ["mnist"]\n')
    expected = Policy(mode="malicious-server", sigma=(1e-4, 1e-2), data=("mnist",))
    assert load_policy(tmp_path / "policy.toml") == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("flor = 3", r"unknown key flor \(did you mean floor\?\); known here: mode, floor"),
        ('mode = "of"', "mode: expected one of 'off', 'on', 'malicious-server', got 'of'"),
        ("floor = 1", "floor: expected int >= 2, got 1"),
        ("sigma = [1e-2, 1e-4]", r"sigma: expected the least value first, got \[0.01, 0.0001\]"),
        ("sigma = 1e-2", "sigma: expected array, got 0.01"),
        ("largest_batch = 1.5", "largest_batch: expected float <= 1.0, got 1.5"),
        ("floor = [", r"policy\.toml is not valid TOML"),
        ("data = [" + "'x'," * (POLICY_BYTES // 4) + "]", "longer than 65,536 bytes"),
        ("\udcff", "cannot be read"),
    ],
)
def test_a_file_that_is_no_policy_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        load_policy(tmp_path / "policy.toml")
    (tmp_path / "policy.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PlanError, match=reason):
        load_policy(tmp_path / "policy.toml")
