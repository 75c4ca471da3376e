"""Change the rate by a schedule of your own: it rises for a tenth of the rounds, then falls evenly.

    python examples/own_schedule.py

The plan names it as "own_schedule:up_and_down" and keeps the hash of this file.
"""

import baffle


def up_and_down(number: int, rounds: int, factor: float) -> float:
    """The share of the rate that round `number` of `rounds` has, from 0 to 1; at the end it is `factor`."""
    rise = max(1, rounds // 10)
    if number < rise:
        return (number + 1) / rise
    return max(factor, (rounds - number) / (rounds - rise))


if __name__ == "__main__":
    settings = {"rounds": 60, "update.schedule": "own_schedule:up_and_down", "update.rate": 0.02}
    summary = baffle.simulate(baffle.load_plan("digits-head", settings), "runs/scheduled")
    verified = baffle.verify("runs/scheduled", own_code=True)
    assert verified.weights_sha256 == summary["weights_sha256"]
    print(f"accuracy {summary['test_accuracy']:.1%}")
