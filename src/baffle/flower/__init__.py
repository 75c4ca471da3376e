"""BAFFLE over Flower: our own server and clients on a SuperLink, and BAFFLE as a Flower App."""
