#!/usr/bin/env python3
"""Run a repository's tests and print its reward as JSON. Runs inside the sandbox; standard library only.

python3 score.py [--repo /srv/repo] [--expected expected.json]

The reward is the part of ``fail_to_pass`` that passes, and 0 as soon as one test of ``pass_to_pass`` does not.
Exit code: 0 for a reward of 1.0, else 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def run_tests(repo: Path) -> tuple[dict[str, bool], str]:
    """Test id -> whether it passed, and the last output of pytest."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
        output = (done.stdout + done.stderr)[-4000:]
        if not report.exists():
            return {}, output
        return {
            f"{case.get('classname')}::{case.get('name')}": not any(
                case.find(tag) is not None for tag in ("failure", "error", "skipped")
            )
            for case in ElementTree.parse(report).iter("testcase")
        }, output


def score(results: dict[str, bool], expected: dict[str, list[str]]) -> dict[str, object]:
    """The reward, and which of the expected tests passed and failed."""
    wanted, kept = expected["fail_to_pass"], expected["pass_to_pass"]
    fixed = [test for test in wanted if results.get(test, False)]
    broken = [test for test in kept if not results.get(test, False)]
    reward = 0.0 if broken else round(len(fixed) / len(wanted), 4)
    failed = [test for test in wanted if test not in fixed] + broken
    return {"reward": reward, "passed": len(wanted) + len(kept) - len(failed), "failed": sorted(failed)}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Run a repository's tests and print its reward as JSON.")
    parser.add_argument("--repo", type=Path, default=Path("/srv/repo"))
    parser.add_argument("--expected", type=Path, default=Path(__file__).with_name("expected.json"))
    options = parser.parse_args()
    results, output = run_tests(options.repo)
    verdict = score(results, json.loads(options.expected.read_text()))
    if not results:
        verdict["output"] = output
    print(json.dumps(verdict))
    return 0 if verdict["reward"] == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
