"""fig-attack: what a server learns about a client from its scalars, and how."""
