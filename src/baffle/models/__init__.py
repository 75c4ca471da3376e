"""The models of the paper, with the variants that it compares as options, and users' own models."""
