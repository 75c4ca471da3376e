"""The server's half of a secure sum, and its count of the traffic."""
