"""Flower as a carrier: a SuperLink and its nodes, and BAFFLE as a Flower App."""
