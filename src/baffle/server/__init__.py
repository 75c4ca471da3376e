"""The server of a run: a round, a run of them, what is recorded and told."""
