"""A process that is one client: it resolves the plan on its command line, probes one batch, and prints the size of its
micro-batches and by how many bytes probing raised its high-water mark."""

import json
import sys

import numpy as np
import torch

from baffle.core.probe import forward_difference
from baffle.data.sources import Dataset, Source
from baffle.plan import parse
from baffle.runtime.torch.trials import grown
from baffle.task.load import load_task
from baffle.trajectory import trajectory_of


def images() -> Source:
    """512 random images of 3 × 32 × 32."""
    random = np.random.default_rng(0)
    x, y = random.random((512, 3, 32, 32), dtype=np.float32), random.integers(0, 10, 512)
    data = Dataset(x, y, lambda samples: samples)
    return Source(data, data, 10)


def main() -> None:
    torch.set_num_threads(1)
    task = load_task(parse(sys.argv[1]))
    weights, runtime = task.initial_weights(), task.runtime()
    trajectory = trajectory_of(task.plan, len(weights))
    batch = task.source.train.batch(task.shares[0][: task.plan.federation.batch])
    size = task.plan.probe.micro_batch
    taken = grown(
        lambda: forward_difference(runtime.on(batch), weights, trajectory.directions(0), trajectory.supports, 1e-3)
    )
    report = {"micro_batch": size, "taken": taken, "bound": task.footprint().bytes(size)}
    report["together"] = task.plan.probe.together
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
