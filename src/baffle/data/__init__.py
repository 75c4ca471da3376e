"""Data sets and how they are shared out among clients. No machine-learning library is needed to read them."""
