"""Write reference.json: what Google's dp-accounting says about Gaussian and discrete Gaussian noise.

The package pins older versions of others, so it has an environment of its own:

    python -m venv ENV && ENV/bin/pip install dp-accounting==0.6.0
    ENV/bin/python tests/privacy/make_reference.py
"""

import json
import math
from pathlib import Path

import numpy as np
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import privacy_loss_distribution, privacy_loss_mechanism
from dp_accounting.rdp import RdpAccountant

OUT = Path(__file__).with_name("reference.json")


def gaussian(noise: float, rounds: int, delta: float) -> float:
    accountant = RdpAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise), rounds))
    return float(accountant.get_epsilon(delta))


def discrete_gaussian(mu: int, delta_2: int, alpha: int) -> float:
    """The Rényi divergence, summed over the library's probabilities."""
    reach = int(14 * math.sqrt(mu))
    law = privacy_loss_mechanism.DiscreteGaussianPrivacyLoss(math.sqrt(mu), delta_2, truncation_bound=2 * reach)
    probabilities = np.diff(law.noise_cdf(np.arange(-reach - 1, reach + 1)))
    one, other = probabilities[delta_2:], probabilities[:-delta_2]
    seen = (one > 1e-30) & (other > 1e-30)  # below, a difference of two sums close to 1 is rounding alone
    return float(np.log(np.sum(one[seen] * (one[seen] / other[seen]) ** (alpha - 1))) / (alpha - 1))


def exact_epsilon(noise: float, rounds: int, delta: float) -> float:
    """By the distribution of the privacy loss itself, of discrete Gaussian noise and a sensitivity of 1."""
    one = privacy_loss_distribution.from_discrete_gaussian_mechanism(noise, value_discretization_interval=1e-4)
    return float(one.self_compose(rounds).get_epsilon_for_delta(delta))


def main() -> None:
    reference = {
        "gaussian": [
            {"noise": noise, "rounds": rounds, "delta": delta, "epsilon": gaussian(noise, rounds, delta)}
            for noise in (1.0, 3.0, 9.8, 40.0)
            for rounds in (1, 50, 200, 1000)
            for delta in (1e-5, 1e-8)
            if 0.02 < rounds / noise**2 < 30
        ],
        "discrete_gaussian": [
            {"mu": mu, "delta_2": delta_2, "alpha": alpha, "rdp": discrete_gaussian(mu, delta_2, alpha)}
            for mu in (400, 1000, 4000)
            for delta_2 in (1, 3)
            for alpha in (2, 3, 5, 8, 16)
        ],
        "exact": [
            {"noise": noise, "rounds": rounds, "delta": 1e-5, "epsilon": exact_epsilon(noise, rounds, 1e-5)}
            for noise, rounds in ((20.0, 200), (20.0, 1000), (40.0, 200), (40.0, 2000))
        ],
    }
    OUT.write_text(json.dumps(reference, indent=1) + "\n")


if __name__ == "__main__":
    main()
