"""``run.py sync|async``: all cases with the client that this Python's environment has."""

import asyncio
import sys

# The order of the cases is that of these imports.
import sandbox_cases  # isort: skip
import command_cases  # isort: skip
import file_cases  # isort: skip
import code_cases  # isort: skip
import life_cases  # isort: skip
from cases import run

__all__ = ["code_cases", "command_cases", "file_cases", "life_cases", "sandbox_cases"]

if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
