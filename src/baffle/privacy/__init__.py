"""Differential privacy: clipping, noise, and accounting of ε. Pure functions of values, which know no plan."""
