"""The link: one websocket a client, over which the server sends requests and the client replies, all of them signed."""
