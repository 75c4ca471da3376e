"""What K scalars tell a server that knows the seed and the weights: labels, inputs, and which samples were in a batch.

Scalars are linear measurements D = Z·g of the mean gradient g of a batch. The server can measure the gradient of any
guess along the same directions, and compare the result with what it received. It has public samples of the same kind as
the clients' samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from baffle.core.arrays import F32, F64, I64

RIDGE = 1e-2  # added to variances, as a share of the mean one, since public samples do not vary in every possible way
TURNS = 3  # the number of solutions for an input; each uses the probabilities of the input found before


class Public(NamedTuple):
    """The scalars that public samples cause, measured by the server one sample at a time."""

    measured: F64  # K rows, one column for each sample
    labels: I64
    classes: int

    def first(self, k: int) -> "Public":
        return self._replace(measured=self.measured[:k])

    def by_label(self) -> F64:
        """The mean over the samples of each label, one column for each label."""
        return np.stack([self.measured[:, self.labels == c].mean(1) for c in range(self.classes)], axis=1)

    def scatter(self) -> float:
        """How much a single measurement of one sample varies within its label."""
        return float(np.mean((self.measured - self.by_label()[:, self.labels]) ** 2))


def labels_by_bias(scalars: F64, biases: F64) -> F64:
    """A score for the presence of each label, from the last layer's biases alone, which needs no public samples.
    `biases` has each direction's values at them, a row for each direction."""
    return -(biases.T @ scalars) / len(scalars)


def labels_by_samples(scalars: F64, public: Public, noise: float = 0.0) -> F64:
    """The share of each label, fitted with the mean scalars that public samples of that label cause. `noise` is the
    variance that was added to each scalar of a mean, times the samples in it."""
    means = public.by_label()
    usual = 1 / public.classes
    variance = usual * (1 - usual)  # of one sample's label; the number of samples divides this and the noise alike
    ridge = (public.scatter() + noise) / variance
    gram = means.T @ means + ridge * np.eye(public.classes)
    return usual + np.linalg.solve(gram, means.T @ (scalars - means.sum(1) * usual))


class Crowd(NamedTuple):
    """How the scalars of single samples are distributed: their mean, and the inverse of their covariance."""

    mean: F64
    precision: F64


def crowd(public: Public, noise: float = 0.0) -> Crowd:
    """The distribution of public samples. `noise` is the variance that was added to each scalar of a mean, times the
    samples in it: as if every sample brought its own part."""
    mean = public.measured.mean(1)
    apart = public.measured - mean[:, None]
    covariance = apart @ apart.T / len(public.labels)
    covariance += (RIDGE * np.trace(covariance) / len(mean) + noise) * np.eye(len(mean))
    return Crowd(mean, np.linalg.inv(covariance))


def membership(scalars: F64, candidates: F64, samples: int, others: Crowd) -> F64:
    """The log-likelihood ratio of each candidate: how much more likely the scalars are with it than without it. They
    are the mean over this many samples; a candidate is a column with the scalars that it would cause alone."""
    apart = candidates - others.mean[:, None]
    weighed = others.precision @ apart
    scores: F64 = (scalars - others.mean) @ weighed - np.sum(apart * weighed, axis=0) / (2 * samples)
    return scores


class Prior(NamedTuple):
    """The distribution of inputs: mean + shape · c, where the entries of c are independent and have variance one."""

    mean: F64
    shape: F64


def prior_of(inputs: F64) -> Prior:
    """The prior that fits public samples, one in each row."""
    mean = inputs.mean(0)
    _, lengths, ways = np.linalg.svd(inputs - mean, full_matrices=False)
    kept = lengths > 1e-6 * lengths[0]
    return Prior(mean, (ways[kept].T * lengths[kept]) / np.sqrt(len(inputs)))


def no_prior(pixels: int) -> Prior:
    """No knowledge of inputs: chooses the shortest input of all that explain the scalars."""
    return Prior(np.zeros(pixels), np.eye(pixels))


def reconstruct(
    scalars: F64, z: F32, weights: F32, prior: Prior, labels: Sequence[int], noise: float
) -> tuple[F64, int]:
    """The input of softmax regression whose gradient (p − e_y) ⊗ (x, 1) fits the scalars best, and its label.

    `z` holds the directions as (K, classes, pixels + 1), and `weights` has the same form. For fixed p and y the
    gradient is linear in x, so a few least squares suffice. `noise` is the variance of a scalar that this input does
    not explain.
    """
    least, best = np.inf, (prior.mean, -1)
    for label in labels:
        x = prior.mean
        for _ in range(TURNS):
            residual = softmax(weights[:, :-1] @ x + weights[:, -1])
            residual[label] -= 1
            seen = np.tensordot(residual.astype(np.float32), z, axes=(0, 1)).astype(np.float64)
            ways = seen[:, :-1] @ prior.shape
            target = scalars - seen[:, -1] - seen[:, :-1] @ prior.mean
            c = ridge_solution(ways, target, noise)
            x = prior.mean + prior.shape @ c
        misfit = float(np.sum((target - ways @ c) ** 2) / noise + c @ c)
        if misfit < least:
            least, best = misfit, (x, label)
    return best


def ridge_solution(a: F64, target: F64, ridge: float) -> F64:
    """argmin ‖a·c − target‖² + ridge·‖c‖², by the smaller of the two systems of normal equations."""
    rows, columns = a.shape
    if rows < columns:
        dual: F64 = a.T @ np.linalg.solve(a @ a.T + ridge * np.eye(rows), target)
        return dual
    return np.linalg.solve(a.T @ a + ridge * np.eye(columns), a.T @ target).astype(np.float64)


def softmax(logits: F64) -> F64:
    powers: F64 = np.exp(logits - float(np.max(logits)))
    return powers / float(np.sum(powers))


def likeness(one: F64, other: F64, mean: F64) -> float:
    """Cosine of two inputs without the mean input: 1 if they are the same, 0 if they are unrelated."""
    a, b = one - mean, other - mean
    return float(a @ b) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30)


def auc(inside: F64, outside: F64) -> float:
    """How often a score inside is above a score outside, with ties counted half: 0.5 by chance."""
    scores, others = np.ravel(inside), np.sort(np.ravel(outside))
    below, up_to = np.searchsorted(others, scores, "left"), np.searchsorted(others, scores, "right")
    return float(np.mean((below + up_to) / 2) / len(others))


def kolmogorov_smirnov(one: F64, other: F64) -> float:
    """The largest difference between two distribution functions. A threshold is right in at most (1 + this) / 2."""
    at = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(values), at, "right") / len(values) for values in (one, other)]
    return float(np.max(np.abs(shares[0] - shares[1])))
