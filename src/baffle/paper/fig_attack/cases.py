"""What fig-attack attacks, at which size, and how well an attack went."""

from typing import NamedTuple

SIGMA = 1e-4  # the paper's

LABELS_BIAS = "labels, from the biases"
LABELS = "labels, with public samples"
MEMBER = "membership"
INPUT = "input, with public samples"
INPUT_BLIND = "input, with no prior"


class Case(NamedTuple):
    """One model, untrained or trained, with one batch size. A client sends each of the numbers of scalars in `ks`."""

    model: str
    trained: bool
    batch: int
    ks: tuple[int, ...]

    @property
    def title(self) -> str:
        return f"{self.model}, {'trained' if self.trained else 'untrained'}"


class Size(NamedTuple):
    """How much one scale of the target does."""

    cases: tuple[Case, ...]
    clients: int
    sums: tuple[int, ...]  # how many clients are in a secure sum
    rounds: int
    public: int  # samples that the server knows
    targets: int  # inputs to reconstruct in a round
    differences: int  # ΔL of each kind of input
    steps: int  # of training


class Score(NamedTuple):
    """How well an attack went in one round. `seen` is the number of clients in the sum, or 0 for a masked vector."""

    case: Case
    attack: str
    k: int
    seen: int
    value: float
    chance: float
