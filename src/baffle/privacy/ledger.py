"""What a client has given away so far, in all runs together, and what it may still give away."""

from dataclasses import dataclass, replace

from baffle.errors import RefusalError
from baffle.privacy.accounting import Release, spent


@dataclass(frozen=True)
class Budget:
    """All private runs together may cost no more than this ε at this δ."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Charge:
    """What one vector costs, and the budget that its client keeps to, if it has one."""

    release: Release
    budget: Budget | None = None


class Ledger:
    """The vectors that one client has paid for. Those that cost alike are counted together."""

    def __init__(self) -> None:
        self._counts: dict[Release, int] = {}

    def add(self, release: Release) -> None:
        one = replace(release, count=1)
        self._counts[one] = self._counts.get(one, 0) + release.count

    def releases(self) -> list[Release]:
        return [replace(release, count=count) for release, count in self._counts.items()]

    def epsilon(self, delta: float, *more: Release) -> float:
        """What all vectors so far, and these, cost together."""
        return spent([*self.releases(), *more], delta)

    def require(self, charge: Charge) -> None:
        """Refuse a vector that the budget does not allow."""
        budget = charge.budget
        if budget is None:
            return
        before, after = self.epsilon(budget.delta), self.epsilon(budget.delta, charge.release)
        if after > budget.epsilon:
            raise RefusalError(
                f"this client's budget is spent: its vectors of all runs have cost ε = {before:.4g} at "
                f"δ = {budget.delta:g}, one more would make it {after:.4g}, and most_epsilon is {budget.epsilon:g}"
            )
