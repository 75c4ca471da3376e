"""A run over a network: the server, its members, how they meet, and whose keys they trust."""
