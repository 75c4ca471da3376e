"""Probe along directions of your own distribution: two of three numbers are 0, the others ± √3.

    python examples/own_distribution.py

The plan names it as "own_distribution:sparse" and keeps the hash of this file.
"""

import numpy as np

import baffle

ONE = 4096  # integers count units of 1/4096


def sparse(codes: np.ndarray) -> np.ndarray:
    """An integer for each code of 16 random bits; together they have mean 0 and mean square 1."""
    third = 65536 // 3
    size = round(ONE * (65536 / (2 * (third // 2))) ** 0.5)
    signs: np.ndarray = np.where(codes < third // 2, -1, np.where(codes < 2 * (third // 2), 1, 0))
    return signs * np.int64(size)


if __name__ == "__main__":
    settings = {"rounds": 60, "probe.distribution": "own_distribution:sparse"}
    summary = baffle.simulate(baffle.load_plan("digits-head", settings), "runs/sparse")
    verified = baffle.verify("runs/sparse", own_code=True)
    assert verified.weights_sha256 == summary["weights_sha256"]
    print(f"accuracy {summary['test_accuracy']:.1%}")
