#!/usr/bin/env python3
"""Launch a sandbox, run a command, write and read a file.

.venv/bin/python examples/quickstart.py [SNAPSHOT]     (default swe-task; `aenv catalog ls` lists others)
"""

import sys

from aenv_run import Sandbox

with Sandbox.create(sys.argv[1] if len(sys.argv) > 1 else "swe-task") as sandbox:
    result = sandbox.commands.run("uname -sr; exit 3")
    print(f"exit code {result.exit_code}, output {result.stdout!r}")  # an exit code is a result, not an error

    sandbox.files.write("/tmp/hello.txt", "hello")
    print(sandbox.files.read("/tmp/hello.txt"), [entry.name for entry in sandbox.files.list("/tmp")])
# The sandbox is gone here. Without `with` it would live until its timeout, or `sandbox.kill()`.
