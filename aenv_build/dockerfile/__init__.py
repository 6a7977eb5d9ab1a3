"""Dockerfiles become recipes: read (``source``), split into words (``words``), translated (``translate``)."""
