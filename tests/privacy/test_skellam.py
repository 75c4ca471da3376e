"""Skellam noise: its stated error attacked term by term, its numbers measured, and the rule in docs/privacy.md of how
many directions are worth their noise."""

import math
import subprocess
import sys
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baffle.core.arrays import F64
from baffle.privacy.skellam import (
    DIGITS,
    MARGIN,
    MORE_BYTES,
    Table,
    draw,
    log_probability,
    log_probability_exactly,
    table,
)
from tests.support.skellam_law import skellam_logs

VARIANCES = [1e-9, 0.01, 0.5, 2.0, 3.7, 31.0, 500.0, 511.9, 512.0, 1e4, 123456.7, 2.0**30, 2.0**50, 2.0**56]
TABLES = [table(Fraction(v) / 2) for v in VARIANCES]
EXACT = Decimal("1e-60")

any_mean = st.one_of(st.floats(1e-9, 1000), st.floats(1, 2.0**55)).map(Fraction)


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def numbers_of(law: Table, block: int) -> list[int]:
    """The least, the greatest and a middle number of a block."""
    start = law.first + (block << law.bits)
    return sorted({start, start + (1 << law.bits) - 1, start + (1 << law.bits) // 3})


@pytest.mark.parametrize("law", TABLES, ids=lambda law: f"{float(law.mean):g}")
def test_no_candidate_needs_a_chance_above_one(law: Table) -> None:
    """Otherwise the table would give too few of some numbers."""
    assert int(law.ends[-1]) == sum(law.weights) - 1 < 2**64
    mode = math.floor(law.mean)
    for block in range(0, len(law.weights), max(1, len(law.weights) // 40)):
        for number in numbers_of(law, block):
            assert 0 < law.accept_exactly(block, number) <= 1
    assert law.accept_exactly((mode - law.first) >> law.bits, mode) <= 1
    assert law.efficiency > 0.9


@pytest.mark.parametrize("law", TABLES, ids=lambda law: f"{float(law.mean):g}")
def test_what_a_table_leaves_out_has_a_probability_below_two_to_minus_hundred_on_each_side(law: Table) -> None:
    with localcontext(prec=DIGITS):
        rate = Decimal(law.mean.numerator) / Decimal(law.mean.denominator)
        after = law.first + (len(law.weights) << law.bits)
        ratio = rate / (after + 1)  # p falls at least this fast from one number to the next
        assert log_probability_exactly(law.mean, after).exp() / (1 - ratio) < Decimal(2) ** -100
        if law.first:
            ratio = (law.first - 1) / rate
            assert log_probability_exactly(law.mean, law.first - 1).exp() / (1 - ratio) < Decimal(2) ** -100


@settings(deadline=None, max_examples=150)
@given(mean=any_mean, place=st.floats(0, 1))
def test_floating_point_is_far_within_its_margin(mean: Fraction, place: float) -> None:
    law = table(mean)
    block = min(int(place * len(law.weights)), len(law.weights) - 1)
    for number in numbers_of(law, block):
        exact = law.accept_exactly(block, number)
        chance = Decimal(float(law.accept(np.array([block]), np.array([number]))[0]))
        assert abs(chance - exact) <= exact * Decimal(MARGIN) / 1024


def test_exact_probabilities_are_exact() -> None:
    """Against sums that need no Stirling: a ratio of neighbours is λ/k, and all of them add up to 1."""
    with localcontext(prec=DIGITS):
        for mean in (Fraction(1, 3), Fraction(997), Fraction(10**9 + 7, 3), Fraction(2**54 + 1)):
            middle = math.floor(mean)
            for k in (middle + 1, middle + 1000):
                step = log_probability_exactly(mean, k) - log_probability_exactly(mean, k - 1)
                expected = (Decimal(mean.numerator) / Decimal(mean.denominator) / k).ln()
                assert abs(step - expected) < EXACT
        whole = sum((log_probability_exactly(Fraction(1003), k).exp() for k in range(400, 2000)), Decimal(0))
        assert abs(whole - 1) < Decimal("1e-50")


class Script:
    """Scripted randomness: first the candidates' words, then the bits that decide a close call."""

    def __init__(self, words: list[list[int]], more: int = 0) -> None:
        self.words, self.more, self.asked = words, more, 0

    def __call__(self, count: int) -> bytes:
        if count == MORE_BYTES:
            self.asked += 1
            return self.more.to_bytes(MORE_BYTES, "big")
        tries = count // 24
        rows = np.full((3, tries), 2**64 - 1, np.uint64)  # rejected: beyond the last block
        columns = np.array(self.words, np.uint64).T
        rows[:, : columns.shape[1]] = columns[:, :tries]
        return rows.astype("<u8").tobytes()


@pytest.mark.parametrize("variance", [0.5, 31.0, 1e4, 2.0**30, 2.0**50])
def test_a_close_call_is_decided_as_exact_arithmetic_decides_it(variance: float) -> None:
    law = table(Fraction(variance) / 2)
    block = len(law.weights) // 3
    offset = (1 << law.bits) // 3
    word = int(law.ends[block])
    sure = [int(law.ends[0]), 0, 0]  # the first block's first number, always accepted
    with localcontext(prec=DIGITS):
        scaled = law.accept_exactly(block, law.first + (block << law.bits) + offset) * Decimal(2) ** 192
        edge = int(scaled)
    for uniform, accepted in ((edge - 1, True), (edge, True), (edge + 1, False)):
        leading, more = divmod(uniform, 2**128)
        script = Script([[word, offset, leading], sure, sure], more)
        number = int(draw(1, variance, script)[0])
        assert script.asked == 1
        assert number == ((block << law.bits) + offset if accepted else 0)


def test_a_clear_call_asks_for_no_more_bits() -> None:
    law = table(Fraction(1.0) / 2)
    script = Script([[int(law.ends[1]), 0, 2**63], [int(law.ends[0]), 0, 2**63]])
    assert draw(1, 1.0, script).tolist() == [1]
    assert not script.asked


@pytest.mark.parametrize(
    ("count", "variances"),
    [
        (200_000, (0.01, 0.5, 3.7, 100.0, 600.0, 5000.0)),
        pytest.param(10**7, (0.5, 31.0, 5000.0), marks=pytest.mark.slow),
    ],
)
def test_drawn_numbers_follow_skellams_law(count: int, variances: tuple[float, ...]) -> None:
    """A chi-square test, up to the tails; the seed is fixed, so that it fails only if the sampler changes."""
    for variance in variances:
        random, most = seeded(5).bytes, int(8 * math.sqrt(variance)) + 12
        drawn = sum(
            np.bincount(np.clip(draw(part, variance, random), -most, most) + most, minlength=2 * most + 1)
            for part in [min(count, 10**6)] * max(1, count // 10**6)
        )
        probabilities = np.exp(skellam_logs(variance, most))
        reach = int(np.flatnonzero(probabilities * count >= 10)[-1])
        middle = np.asarray(drawn)[most - reach : most + reach + 1]
        expected = probabilities[np.abs(np.arange(-reach, reach + 1))] * count
        outside, cells = count - expected.sum(), 2 * reach + 1
        beyond = (count - middle.sum() - outside) ** 2 / outside
        statistic = float((((middle - expected) ** 2) / expected).sum() + beyond)
        assert abs(statistic - cells) < 4.5 * math.sqrt(2 * cells) + 6, variance


@pytest.mark.parametrize("variance", [2.0**20, 2.0**56])
def test_numbers_of_a_large_variance_are_nearly_normal(variance: float) -> None:
    count = 200_000
    scaled: F64 = np.sort(draw(count, variance, seeded(6).bytes) / math.sqrt(variance))
    normal = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in scaled.tolist()])
    gap = np.abs(normal - (np.arange(count) + 0.5) / count).max()
    assert gap < 1.95 / math.sqrt(count)  # Kolmogorov and Smirnov: 0.1 % of true samples are beyond
    assert scaled.var() == pytest.approx(1, abs=5 * math.sqrt(2 / count))


@pytest.mark.parametrize("variance", [2.0**20, 2.0**56])
def test_no_low_bit_is_favoured(variance: float) -> None:
    """A sampler that rounded a real number would leave gaps; here every low bit is a coin."""
    drawn = draw(100_000, variance, seeded(7).bytes)
    for bit in range(8):
        assert abs(float(((drawn >> bit) & 1).mean()) - 0.5) < 5 * 0.5 / math.sqrt(len(drawn))


def test_neighbouring_numbers_are_independent() -> None:
    for variance in (2.0, 2.0**40):
        drawn = draw(200_000, variance, seeded(8).bytes) / math.sqrt(variance)
        assert abs(float((drawn[1:] * drawn[:-1]).mean())) < 5 / math.sqrt(len(drawn))


@settings(deadline=None, max_examples=20)
@given(parts=st.lists(st.floats(0.1, 1e6), min_size=2, max_size=5))
def test_shares_add_up_to_the_variance_of_the_sum(parts: list[float]) -> None:
    random = seeded(9).bytes
    total = sum((draw(20_000, part, random) for part in parts), np.zeros(20_000, np.int64))
    variance = sum(parts)
    spread = math.sqrt((2 + 1 / variance) / 20_000)  # of the measured variance, relative
    assert float((total**2).mean()) == pytest.approx(variance, rel=5.5 * spread)


def test_the_same_bytes_give_the_same_noise_and_the_system_never_does() -> None:
    assert (draw(50, Fraction(7, 2), seeded(2).bytes) == draw(50, 3.5, seeded(2).bytes)).all()
    assert (draw(100, 1e9) != draw(100, 1e9)).any()


def test_processes_that_were_one_draw_different_noise() -> None:
    """A generator in the process would go on in both copies after a fork, and one would cancel the other's noise."""
    say = "os.write(1, f'{draw(9, 1e9).tolist()}\\n'.encode())"  # at once, so that lines do not mix
    script = f"import os; from baffle.privacy.skellam import draw; draw(9, 1e9); os.fork(); {say}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    one, other = done.stdout.splitlines()
    assert one != other


def test_no_variance_is_no_noise_and_a_bad_one_is_refused() -> None:
    assert draw(3, 0.0).tolist() == [0, 0, 0]
    assert draw(0, 5.0).tolist() == []
    for variance in (-1.0, math.inf, math.nan, 2.0**57):
        with pytest.raises(ValueError, match="a variance of 0 to 2⁵⁶"):
            draw(1, variance)
    with pytest.raises(ValueError, match="a count from 0"):
        draw(-1, 1.0)


def test_probabilities_in_floating_point_hold_at_the_ends() -> None:
    assert log_probability(Fraction(1, 2), np.array([0, 1, 2])).tolist() == pytest.approx(
        [-0.5, math.log(0.5) - 0.5, math.log(0.125) - 0.5], abs=1e-14
    )


N, CLIENTS, STEPS = 400, 100, 2**16


@pytest.mark.parametrize("noise", [0.0, 5.0, 20.0])
@pytest.mark.parametrize("agreement", [1.0, 0.5])
@pytest.mark.parametrize("k", [20, 800])
def test_noise_costs_as_much_as_the_directions_that_the_rule_takes_away(noise: float, agreement: float, k: int) -> None:
    """Clients' vectors have the length of the clipping norm, STEPS, and their mean is `agreement` times as long."""
    worth = k / (1 + noise**2 * k / (agreement * CLIENTS) ** 2)
    random = np.random.default_rng([int(noise), k])
    cosines = []
    for _ in range(40):
        directions = random.standard_normal((k, N))
        scalars = directions @ (gradient := random.standard_normal(N))
        total = CLIENTS * agreement * STEPS * scalars / np.linalg.norm(scalars)
        estimate = directions.T @ (total + draw(k, (noise * STEPS) ** 2, random.bytes))
        cosines.append(estimate @ gradient / (np.linalg.norm(estimate) * np.linalg.norm(gradient)))
    expected = math.sqrt(worth / (worth + N + 1))
    spread = float(np.std(cosines)) / math.sqrt(len(cosines))
    assert float(np.mean(cosines)) == pytest.approx(expected, abs=4 * spread + 0.01)
