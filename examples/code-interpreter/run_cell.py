#!/usr/bin/env python3
"""Runs its argument (or stdin) as a cell of the kernel that runs in the sandbox, and shows what it shows.

The exit code is 1 where the cell raised; the traceback is on stderr. State stays in the kernel between calls.
"""

import os
import sys

from jupyter_client import BlockingKernelClient

TIMEOUT_S = 60.0


def show(message: dict[str, object]) -> None:
    """What a cell writes, the value of its last line, and a traceback."""
    content = message["content"]
    assert isinstance(content, dict)
    match message["msg_type"]:
        case "stream":
            (sys.stderr if content["name"] == "stderr" else sys.stdout).write(content["text"])
        case "execute_result" | "display_data":
            print(content["data"].get("text/plain", ""))
        case "error":
            print("\n".join(content["traceback"]), file=sys.stderr)


def main() -> int:
    """Run the cell."""
    cell = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
    client = BlockingKernelClient(connection_file=os.environ["KERNEL"])
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT_S)
        reply = client.execute_interactive(cell, store_history=False, output_hook=show, timeout=TIMEOUT_S)
    finally:
        client.stop_channels()
    return 0 if reply["content"]["status"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
