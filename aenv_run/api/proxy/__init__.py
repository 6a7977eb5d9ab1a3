"""The way from a client of the server to a port of a sandbox. Tokens of its own; the API key opens none."""
