"""Noise, bounds and counting for differential privacy: values in, values out, and no plan."""
