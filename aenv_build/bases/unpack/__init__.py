"""The child process that unpacks untrusted archives: see ``__main__``. Run by path, never imported."""
