"""What a scalar costs on ONNX Runtime: many outer directions in one pass, against one pass a direction.

    python benchmarks/outer_onnx.py                                   # a table
    python benchmarks/outer_onnx.py --json > results/outer_onnx.json

The models of benchmarks/outer.py, exported. Both ways run in one process on one thread, in turns; a turn is a probe
along K directions, and its CPU time is that of the least turn. One pass a direction has dense directions of ±1.

The last columns tell why weights stay inputs of the graph: as constants, they make a pass quicker, but a session has to
be opened for them in every round.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, load_model_from_string, numpy_helper
from outer import CLASSES, MODELS, SIGMA, cpu_seconds, main

from baffle.core.arrays import F32
from baffle.core.directions import OUTER, RADEMACHER, Directions, dense, distribution_of
from baffle.core.ports import Batch
from baffle.core.probe import forward_difference
from baffle.runtime.onnx.from_module import graph_of
from baffle.runtime.onnx.graph import OnnxGraph
from baffle.runtime.onnx.loss import OnnxLoss
from baffle.runtime.onnx.model_folder import LOGITS, WEIGHT
from baffle.runtime.onnx.outer import OnnxOuter
from baffle.runtime.onnx.outer_graph import outer_model
from baffle.runtime.onnx.session import open_session
from baffle.runtime.outer import how_many, steps
from baffle.task.sharing import SHARED_PASS


def with_constants(graph: bytes, weights: dict[str, F32]) -> bytes:
    """The graph with its weights as constants."""
    model: ModelProto = load_model_from_string(graph)
    others = [value for value in model.graph.input if not value.name.startswith(WEIGHT)]
    del model.graph.input[:]
    model.graph.input.extend(others)
    model.graph.initializer.extend(numpy_helper.from_array(values, WEIGHT + name) for name, values in weights.items())
    return bytes(model.SerializeToString())


def least(works: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """CPU seconds of each work's least turn. The works take turns."""
    for work in works.values():
        work()
    taken = [{name: cpu_seconds(work) for name, work in works.items()} for _ in range(turns)]
    return {name: min(turn[name] for turn in taken) for name in works}


@cache
def exported(name: str) -> OnnxGraph:
    make, data = MODELS[name]
    torch.manual_seed(0)
    x = data(1)
    return graph_of(make().eval(), x.shape[1:], x.dtype)


def measured(name: str, samples: int, k: int, turns: int) -> dict[str, Any]:
    """One row: CPU time of a scalar both ways, how far losses are apart, and what constants would bring."""
    graph = exported(name)
    model, weights, outer = graph.to_bytes(), graph.flat(), outer_model(graph)
    manifest = graph.manifest(model, weights)
    batch = Batch(MODELS[name][1](samples), np.random.default_rng(1).integers(0, CLASSES, samples))
    together = how_many(k, outer.row_bytes * samples, SHARED_PASS)
    plain = OnnxLoss(manifest, model)
    many = OnnxOuter(manifest, outer.graph, lambda: plain, together=together)
    drawn, signs = Directions(bytes(32), distribution_of(OUTER, many.shapes)), Directions(bytes(32), RADEMACHER)
    supports = dense(len(weights), k)
    alone, shared = plain.on(batch), (many if together > 1 else plain).on(batch)
    constant = with_constants(outer.graph, dict(graph.weights))
    factors = steps(drawn, range(together), supports, SIGMA, many.shapes)
    sessions = {"inputs": open_session(outer.graph), "constants": open_session(constant)}
    inputs = many.inputs_of(weights, (batch.x,), factors)
    taken = {way: {i.name: inputs[i.name] for i in session.get_inputs()} for way, session in sessions.items()}
    best = least(
        {
            "alone": partial(forward_difference, alone, weights, signs, supports, SIGMA),
            "together": partial(forward_difference, shared, weights, drawn, supports, SIGMA),
            **{way: partial(session.run, [LOGITS], taken[way]) for way, session in sessions.items()},
            "open": partial(open_session, constant),
        },
        turns,
    )
    one, other = (forward_difference(loss, weights, drawn, supports[:8], SIGMA).scalars for loss in (alone, shared))
    return {
        "model": name,
        "weights": len(weights),
        "samples": samples,
        "together": together,
        "alone_ms": round(1000 * best["alone"] / k, 4),
        "together_ms": round(1000 * best["together"] / k, 4),
        "times": round(best["alone"] / best["together"], 2),
        "losses_apart": float(np.max(np.abs(one - other))) * SIGMA,
        "constants_times": round(best["inputs"] / best["constants"], 2),
        "open_ms": round(1000 * best["open"], 2),
        "probe_ms": round(1000 * best["together"], 2),
    }


LINE = (
    "{model:42} {samples:3} samples: {alone_ms:8.3f} ms alone, {together_ms:8.3f} with {together} together: "
    "{times:.1f}×; constants {constants_times:.2f}×, opened in {open_ms:.1f} ms"
)

if __name__ == "__main__":
    main(str(__doc__), measured, LINE)
