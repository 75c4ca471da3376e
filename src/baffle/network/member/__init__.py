"""A client of a networked run: what it agrees to, how it answers, and what it computes with."""
