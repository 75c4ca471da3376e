"""One client on a made-up runtime, which remembers what it was asked."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from baffle.client.client import Client
from baffle.client.replica import Replica
from baffle.client.worker import Worker
from baffle.core.arrays import F32, F64
from baffle.core.messages import CatchUp, Contribution, Reply, RoundRequest, decode_reply, encode
from baffle.core.ports import Batch
from baffle.core.probe import Loss
from baffle.core.ring import Sum
from baffle.core.state import FLOAT, ServerState
from baffle.data.sources import Dataset
from baffle.lineage import Lineage
from baffle.plan import Plan
from baffle.trajectory import Trajectory, trajectory_of

SAMPLES = 20
FORWARD = ["probe.scheme=forward"]
CENTRAL = ["probe.scheme=central"]
BACKPROP = ['estimator="backprop"']
EPOCH = ['federation.level="epoch"', "federation.epochs=3"]
STEPS = ['federation.level="epoch"', "federation.steps=6"]
OWN = ["federation.seeds=own"]


@dataclass
class Bowl:
    """A runtime whose loss is a parabola around a batch's mean label. It remembers its batches, forwards and seeds. Its
    loss can be given, for every forward or for the one with the number `when`."""

    n: int
    loss: float | None = None
    when: int | None = None
    forwards: int = 0
    batches: list[list[int]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    def on(self, batch: Batch) -> Loss:
        self.batches.append(batch.y.tolist())

        def loss(weights: F32) -> float:
            self.forwards += 1
            distance = weights.astype(np.float64) - np.mean(batch.y) / SAMPLES
            if self.loss is not None and self.when in (None, self.forwards):
                return self.loss
            return float(np.mean(distance**2))

        return loss

    def outputs(self, weights: F32, batch: Batch) -> F32:
        return np.zeros((len(batch.y), 1), np.float32) + weights[:1]

    def gradient_on(self, batch: Batch, seed: int | None = 0) -> Callable[[F32], tuple[float, F32]]:
        self.seeds.append(seed)
        loss = self.on(batch)
        centre = np.float32(np.mean(batch.y) / SAMPLES)
        return lambda weights: (loss(weights), 2 * (weights - centre) / np.float32(self.n))


class Setting:
    """One client on twenty numbered samples, and the server's first state."""

    def __init__(
        self, plan: Plan, runtime: Bowl, *, number: int = 0, k: int | None = None, held: int = SAMPLES
    ) -> None:
        self.trajectory: Trajectory = trajectory_of(plan, runtime.n)
        self.state: ServerState = self.trajectory.rule.start(np.linspace(-1, 1, runtime.n, dtype=np.float32))
        data = Dataset(np.arange(SAMPLES), np.arange(SAMPLES), lambda x: x.astype(np.float32)[:, None])
        lineage = Lineage(self.trajectory)
        replica = Replica(lineage, lineage.beginning(self.state))
        self.worker = Worker(
            number, k or plan.probe.k, self.trajectory, data, np.arange(held), lambda: nullcontext(runtime)
        )
        self.client = Client(replica, self.worker)

    def request(self, number: int = 0) -> bytes:
        catch_up = CatchUp("weights", number, (self.state.weights.astype(FLOAT).tobytes(),))
        return encode(RoundRequest(number, self.trajectory.digest, bytes(32), self.state.weights_hash(), catch_up))

    def reply(self, number: int = 0) -> Reply:
        return decode_reply(self.client.answer(self.request(number)))

    def sent(self, number: int = 0) -> Sum:
        reply = self.reply(number)
        assert isinstance(reply, Contribution)
        assert reply.round == number
        return self.trajectory.ring.decode(reply.elements().astype(np.uint32), 1)

    def values(self, number: int = 0) -> F64:
        """The values that were sent, per sample."""
        total = self.sent(number)
        mean: F64 = total.totals / (self.trajectory.ring.scale * total.weight)
        return mean


def plan_for(tiny: Callable[..., Plan], *settings: str) -> Plan:
    return tiny("ring.n_max=20", "federation.batch=6", "probe.sigma=1e-4", "run.downlink=weights", *settings)
