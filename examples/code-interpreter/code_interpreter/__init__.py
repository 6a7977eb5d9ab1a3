"""Jupyter kernels behind the HTTP interface that E2B's code-interpreter clients speak, on port 49999 of a sandbox."""
