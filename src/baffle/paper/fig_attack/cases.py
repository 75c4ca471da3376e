"""What fig-attack attacks, at which size, and how well an attack went."""

from typing import NamedTuple

SIGMA = 1e-4  # the paper's
LABELS_BIAS, LABELS, MEMBER = "labels, from the biases", "labels, with public samples", "membership"
INPUT, INPUT_BLIND = "input, with public samples", "input, with no prior"


class Case(NamedTuple):
    """One model at some weights, batches of some size, and how many scalars a client sends."""

    model: str
    trained: bool
    batch: int
    ks: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{self.model}, {'trained' if self.trained else 'untrained'}"


class Size(NamedTuple):
    cases: tuple[Case, ...]
    clients: int
    sums: tuple[int, ...]
    rounds: int
    public: int
    targets: int  # inputs to reconstruct in a round
    differences: int  # ΔL of each kind of input
    steps: int  # of training


class Score(NamedTuple):
    """How well an attack went in one round, with what is seen (clients in the sum, 0: a masked vector)."""

    case: Case
    attack: str
    k: int
    seen: int
    value: float
    chance: float
