"""fig-attack: what a server learns about a client from its scalars, from a secure sum of them, and from masked ones."""

from baffle.paper.fig_attack.target import TARGET

__all__ = ["TARGET"]
