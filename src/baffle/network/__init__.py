"""A run over a network: its server, its members (the clients), their keys, and the link between them."""
