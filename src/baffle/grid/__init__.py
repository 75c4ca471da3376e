"""Grids of independent runs: which runs there are, who plays them, and what they come to over several seeds."""
