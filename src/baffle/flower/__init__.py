"""BAFFLE as a Flower App."""
