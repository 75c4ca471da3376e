"""Chooses σ, rate, K and batch by short trials on a plan's own training data, and says why."""
