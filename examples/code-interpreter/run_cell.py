#!/usr/bin/env python3
"""Runs its argument (or stdin) as a cell of the default context of the sandbox, and shows what it shows.

The exit code is 1 where the cell raised; the traceback is on stderr. State stays in the kernel between calls.
"""

import http.client
import json
import sys

PORT = 49999


def show(line: dict[str, object]) -> bool:
    """What a cell writes, the text of its results, and a traceback; False for the latter."""
    match line["type"]:
        case "stdout" | "stderr":
            (sys.stderr if line["type"] == "stderr" else sys.stdout).write(str(line["text"]))
        case "result":
            print(line.get("text", ""), flush=True)
        case "error":
            print(line["traceback"] or f"{line['name']}: {line['value']}", file=sys.stderr)
            return False
    return True


def main() -> int:
    """Run the cell."""
    cell = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
    connection = http.client.HTTPConnection("127.0.0.1", PORT)
    connection.request("POST", "/execute", json.dumps({"code": cell}), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        print(answer.read().decode(), file=sys.stderr)
        return 1
    shown = [show(json.loads(line)) for line in answer]
    return 0 if all(shown) else 1


if __name__ == "__main__":
    sys.exit(main())
