#!/usr/bin/env python3
"""Pause a sandbox with a process in it, and go on later: it costs nothing but disk space meanwhile.

.venv/bin/python examples/pause_resume.py [SNAPSHOT]
"""

import sys
import time

from aenv_run import Sandbox

COUNT = "n=0; while :; do n=$((n+1)); echo $n >/dev/shm/n; sleep 0.1; done"

with Sandbox.create(sys.argv[1] if len(sys.argv) > 1 else "swe-task") as sandbox:
    sandbox.commands.run(COUNT, background=True, timeout=None)
    time.sleep(1)
    sandbox.pause()
    print(f"{sandbox.sandbox_id} is {sandbox.get_info().state.value}")  # it would survive the end of this script

    same = Sandbox.connect(sandbox.sandbox_id)  # from any process: connecting resumes
    first = same.files.read("/dev/shm/n").strip()
    time.sleep(1)
    print(f"it counts on: {first}, {same.files.read('/dev/shm/n').strip()}")
