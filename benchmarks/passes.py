"""Memory and time of forward passes of an exported model, in a process without PyTorch.

python benchmarks/passes.py MODEL    # a folder of baffle export; prints JSON
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
from edge import FOREIGN, resident_mb

from baffle.core.freed_memory import give_back_freed_memory
from baffle.core.ports import Batch
from baffle.network.member.edge import LARGE_BLOCK, MICRO_BATCH as AT_ONCE
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import initial_weights

PASSES = 15


def measured(model: Path) -> dict[str, float]:
    """Passes of four images, as an edge client makes them."""
    give_back_freed_memory(LARGE_BLOCK)
    imports = resident_mb()
    runtime = OnnxLoss.in_folder(model)
    weights = initial_weights(model, runtime.manifest)
    x = np.random.default_rng(0).standard_normal((AT_ONCE, *runtime.manifest.input_shape)).astype(np.float32)
    loss, seconds = runtime.on(Batch(x, np.zeros(AT_ONCE, np.int64))), list[float]()
    for _ in range(PASSES):
        began = time.process_time()
        loss(weights)
        seconds.append(time.process_time() - began)
    assert not any(name in sys.modules for name in FOREIGN)
    return {"imports_mb": round(imports, 1), "peak_mb": round(resident_mb(), 1), "ms": round(1e3 * median(seconds), 1)}


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]))))
