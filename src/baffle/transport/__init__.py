"""Ways for messages to reach clients and for replies to come back."""
