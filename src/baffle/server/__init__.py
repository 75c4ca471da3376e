"""The server of a run: one round, all rounds in order, and what is recorded and reported about them."""
