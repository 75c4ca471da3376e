"""Keys, certificates and rosters of a federation: how they are made, read and replaced."""
