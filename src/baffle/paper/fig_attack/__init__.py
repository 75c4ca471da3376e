"""fig-attack: what a server learns about a client from its scalars, from a secure sum of them, and from masked ones."""
