"""``python -m aenv_run.cli`` is ``aenv``."""

from aenv_run.cli import main

main()
