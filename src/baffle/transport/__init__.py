"""Transports inside one process: they carry requests to clients and bring back the replies."""
