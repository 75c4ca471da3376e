"""Handwriting by the people who wrote it: MNIST, with each of its 539 writers as a client.

python examples/handwriting_by_writers.py FOLDER

FOLDER holds mnist/ with the files of MNIST and the label files of QMNIST, which say who wrote what (docs/data.md). The
same can be said as a plan: see the settings below. A tenth of the writers takes part in a round, under a secure sum.
"""

import sys

import baffle
from baffle.journal.folder import new_folder

plan = baffle.load_plan(
    "digits",
    [
        "name=writers",
        "task.data=mnist",
        "task.model={name='softmax'}",
        "federation.partition=writer",
        "federation.clients=539",
        "federation.participation=0.1",
        "rounds=60",
        "run.evaluate_every=20",
    ],
)
with new_folder(plan.name) as folder:
    summary = baffle.simulate(plan, folder, data=sys.argv[1])
up = f"{summary['uplink_bytes_per_client_round']:,} bytes up a client and round"
print(f"accuracy {summary['test_accuracy']:.1%}; {up}")
print(f"verified: {baffle.verify(folder).rounds} rounds")
