"""Rounds of several steps: how many they have follows from the plan, and where a client walks from its own replay."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from baffle.core.messages import Abstention, CatchUp, Contribution, Group, Outcome, RoundRequest, decode_reply, encode
from baffle.core.ring import EXTRAS, RingVector
from baffle.core.state import apply, distance
from baffle.errors import ChainError, MessageError
from baffle.lineage import Lineage
from baffle.plan import Plan
from tests.support.one_client import SAMPLES, Bowl, Setting

STEPS, N, ROUNDS = 3, 9, 3


class Story:
    """A client, and a server that can prove some rounds; of these the first has one step."""

    def __init__(self, tiny: Callable[..., Plan]) -> None:
        local = (f"federation.local_steps={STEPS}", "federation.warm_up=1", "federation.batch=6", "ring.n_max=20")
        self.client = Setting(tiny(*local, "federation.clients=1", "secure.floor=2"), Bowl(N))
        self.trajectory, self.lineage = self.client.trajectory, Lineage(self.client.trajectory)
        self.presents, self.outcomes = [self.lineage.beginning(self.client.state)], list[Outcome]()
        for number in range(ROUNDS):
            totals = np.random.default_rng(number).integers(-1000, 1000, self.trajectory.length).astype("<i4")
            self.outcomes.append(Outcome(number, "scalars", (Group(number, totals.tobytes(), 10),)))
            self.presents.append(self.lineage.advance(self.presents[-1], encode(self.outcomes[-1])))

    def request(self, number: int, outcomes: list[Outcome]) -> RoundRequest:
        present, items = self.presents[number], tuple(map(encode, outcomes))
        catch_up = CatchUp("outcomes", number - len(items), items)
        return RoundRequest(number, self.trajectory.digest, present.chain, present.state.weights_hash(), catch_up)

    def ask(self, request: RoundRequest) -> object:
        return decode_reply(self.client.client.answer(encode(request)))


@pytest.fixture
def story(tiny: Callable[..., Plan]) -> Story:
    return Story(tiny)


def with_steps(outcome: Outcome, steps: int) -> Outcome:
    """The outcome with the totals of so many steps, the first one's in place of those that it has not."""
    (group,) = outcome.groups
    rows = np.frombuffer(group.totals, "<i4").reshape(STEPS, -1)
    totals = np.resize(rows, (steps, rows.shape[1])).astype("<i4").tobytes()
    return msgspec.structs.replace(outcome, groups=(msgspec.structs.replace(group, totals=totals),))


@pytest.mark.parametrize("steps", [1, STEPS - 1, STEPS + 1, 100])
def test_an_outcome_with_another_number_of_steps_is_no_outcome(story: Story, steps: int) -> None:
    lied = [*story.outcomes[:2], with_steps(story.outcomes[2], steps)]
    assert isinstance(story.ask(story.request(3, lied)), Abstention)
    with pytest.raises(ChainError, match=r"expected .* bytes"):
        story.lineage.advance(story.presents[2], encode(lied[2]))
    assert isinstance(story.ask(story.request(3, story.outcomes)), Contribution)


def test_a_server_cannot_have_a_round_walked_as_another_one(story: Story) -> None:
    """A round's number decides how many steps a client takes, and along which directions."""
    honest = story.request(3, story.outcomes)
    for number in (0, 2, 4, 10**6):
        assert isinstance(story.ask(msgspec.structs.replace(honest, round=number)), Abstention)
    assert isinstance(story.ask(honest), Contribution)


def test_a_server_cannot_give_a_client_another_state_to_walk_from(story: Story) -> None:
    """Equal weights with other moments: neither the weights alone nor totals in another order lead to the chain."""
    honest = story.request(3, story.outcomes)
    weights = story.presents[3].state.weights.astype("<f4").tobytes()
    sent = msgspec.structs.replace(honest, catch_up=CatchUp("weights", 3, (weights,)))
    assert isinstance(story.ask(sent), Abstention)
    (group,) = story.outcomes[2].groups
    swapped = np.frombuffer(group.totals, "<i4").reshape(STEPS, -1)[[1, 0, 2]].tobytes()
    other = msgspec.structs.replace(story.outcomes[2], groups=(Group(2, swapped, 10),))
    assert isinstance(story.ask(story.request(3, [*story.outcomes[:2], other])), Abstention)
    assert isinstance(story.ask(honest), Contribution)


def test_tiny_moments_cannot_send_a_client_far_away(story: Story) -> None:
    """Invented outcomes of next to nothing leave second moments of next to nothing, by which the client's own gradient
    is divided. It sends what it would send for a loss that is not finite, in as many passes."""
    state = story.presents[0].state
    for number in range(2):
        totals = np.full(story.trajectory.length, 1, "<i4").tobytes()
        state = apply(story.trajectory.rule, state, Outcome(number, "scalars", (Group(number, totals, 10),)))
    assert distance(story.presents[0].state.weights, state.weights) < 0.1
    runtime = Bowl(N)
    steered = Setting(story.trajectory.plan, runtime).worker
    free, passes = steered.vector(2, state.weights, state.optimizer), runtime.forwards
    own = apply(story.trajectory.rule, state, Outcome(2, "scalars", (group_of(story, free),)))
    assert distance(state.weights, own.weights) > 10
    bounded = replace(steered, most_step=10.0).vector(2, state.weights, state.optimizer)
    assert np.array_equal(bounded, story.trajectory.ring.nothing(story.trajectory.length, SAMPLES))
    assert runtime.forwards == 2 * passes


def group_of(story: Story, vector: RingVector) -> Group:
    total = story.trajectory.ring.decode(vector, 1)
    return Group(2, total.totals.astype("<i4").tobytes(), total.weight)


def test_what_a_client_hides_behind_a_short_round_changes_nothing(story: Story) -> None:
    rule, start, ring = story.trajectory.rule, story.presents[0].state, story.trajectory.ring
    vector = story.client.worker.vector(0, start.weights)
    row = story.trajectory.length // STEPS
    assert not vector[row:-EXTRAS].any()
    stuffed = vector.copy()
    stuffed[row:-EXTRAS] = 12345
    ends = []
    for each in (vector, stuffed):
        total = ring.decode(each, 1)
        outcome = Outcome(0, "scalars", (Group(0, total.totals.astype("<i4").tobytes(), total.weight),))
        ends.append(apply(rule, start, outcome).digest())
    assert ends[0] == ends[1]
    stuffed[row] = 2**30
    with pytest.raises(MessageError, match=r"more than 1 clients .* can send within their bounds"):
        ring.decode(stuffed, 1)


def test_the_totals_of_every_step_are_bounded(story: Story) -> None:
    for step in range(STEPS):
        totals = np.zeros((STEPS, story.trajectory.length // STEPS), np.int32)
        totals[step, 0] = 2**30
        assert story.trajectory.ring.beyond(totals.reshape(-1), 1, 10) == 2**30
