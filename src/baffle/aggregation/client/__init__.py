"""The client's half of a secure sum."""
