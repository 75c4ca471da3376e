"""The server's half of a secure sum, and what it keeps of the traffic."""
