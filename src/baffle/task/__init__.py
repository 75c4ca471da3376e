"""Loads the model and data that a plan names, and measures them before a run starts."""
