"""``python -m tests.sdk.table``: every method of E2B's clients by version and result, for docs/sdks.md.

``--client 2.63.0/async`` (repeatable) tries only some.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.e2e.conftest import node_home
from tests.sdk.runs import EVERY, rows, served


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", action="append", help="VERSION/sync, VERSION/async or js")
    parser.add_argument("--seconds", action="store_true", help="of each case too")
    options = parser.parse_args()
    chosen = [tuple(name.partition("/")[::2]) for name in options.client or []]
    with tempfile.TemporaryDirectory(prefix="aenv-", dir="/var/tmp") as name:
        folder = Path(name)
        with node_home(folder) as home, served(folder, home) as server:
            outcomes = server.run_all([(version, mode) for version, mode in chosen] or EVERY)
            log = (folder / "serve.log").read_text()
    head, *lines = rows(outcomes)
    for line in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(line) + " |")
    failed = False
    for client, found in outcomes.items():
        for one in found:
            if one.ok is False:
                failed = True
                sys.stderr.write(f"{client}: {one.method}: {one.detail}\n")
            elif options.seconds:
                sys.stderr.write(f"{client}: {one.method}: {one.seconds} s\n")
    if failed:
        sys.stderr.write(log[-8000:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
