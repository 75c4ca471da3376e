"""The server of a networked run: its clients, its epochs, its status."""
