"""Jupyter kernels behind the HTTP interface of E2B's code-interpreter clients, on port 49999 of a sandbox."""
