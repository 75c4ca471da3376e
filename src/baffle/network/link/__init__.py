"""The link: one websocket a client, over which the server asks and the client answers. Every message is signed."""
