"""The command aenv-build."""
