"""Predicts what a run will cost and whether its probes are precise enough, by measurements before it starts."""
