"""A text classifier on sentence features: your encoder stays as it is, a linear head is trained federated.

python examples/sentences.py FOLDER

FOLDER holds text/trec-minilm.npz: features of the TREC questions (x_train, y_train, x_test, y_test), six kinds of
question. Any encoder will do: its outputs for all sentences, as arrays, are all that is needed.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import baffle

arrays = np.load(Path(sys.argv[1]) / "text" / "trec-minilm.npz")
x, y = arrays["x_train"].astype(np.float32), arrays["y_train"]
test = arrays["x_test"].astype(np.float32), arrays["y_test"]

torch.manual_seed(0)
head = nn.Linear(x.shape[1], int(y.max()) + 1)
plan = {"rounds": 400, "probe": {"k": 50}, "federation.batch": 64, "update.rate": 0.01}
run = baffle.fit(head, (x, y), test, plan=plan)
print(f"accuracy {run['test_accuracy']:.1%}, {run['uplink_bytes_per_client_round']:,} bytes up a client and round")
