"""Runtimes: each turns a model's weights and a batch of samples into a loss."""
