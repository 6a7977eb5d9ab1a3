"""``/aenv/v1``: what the command line and the SDK need of a server beyond what E2B's clients do."""
