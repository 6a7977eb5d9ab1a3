"""Layers that are read by range while they are used: a cache of verified chunks, and the server of it."""
