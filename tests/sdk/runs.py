"""Runs clients against ``aenv serve`` and gathers what each method did."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aenv_run.paths import Home
from tests.e2e.conftest import environment
from tests.leftovers import MARKER
from tests.sdk.environments import PYTHONS, ROOT, SDKS, node, python
from tests.sdk.front import DOMAIN, Front, front
from tests.sdk.image import build

CLIENTS = Path(__file__).parent / "clients"
KEY = "e2b_" + "5d" * 32
#: Of one client, all cases.
TIMEOUT_S = 900.0
START_S = 60.0
#: Every client: the version, and of Python's the mode.
EVERY = (*((version, mode) for version in PYTHONS for mode in ("sync", "async")), ("js", ""))


@dataclass(frozen=True)
class Outcome:
    """One method of one client; ``ok`` is None where this client has no such method."""

    method: str
    ok: bool | None
    detail: str
    seconds: float


@dataclass(frozen=True)
class Served:
    """A server with the image of the clients, and its front."""

    home: Home
    url: str
    front: Front

    def run(self, version: str, mode: str, without: str = "") -> list[Outcome]:
        """All cases of a client, but for those whose names this pattern finds."""
        script: list[str | Path] = [node(), CLIENTS / "run.mjs"]
        if version != "js":
            script = [python(f"python-{version}"), CLIENTS / "run.py", mode]
        with tempfile.TemporaryDirectory(prefix="aenv-sdk-") as context:
            variables = {
                "PATH": os.environ["PATH"],
                "HOME": context,
                "PYTHONDONTWRITEBYTECODE": "1",
                "E2B_API_KEY": KEY,
                "E2B_API_URL": self.url,
                "E2B_DOMAIN": DOMAIN,
                "SSL_CERT_FILE": str(self.front.authority),
                "NODE_EXTRA_CA_CERTS": str(self.front.authority),
                "SDK_CONTEXT": context,
                "SDK_WITHOUT": without,
                "SDK_MODULES": str(SDKS / "js"),
            }
            variables |= {name: value for name, value in os.environ.items() if name == MARKER}
            try:
                done = subprocess.run(
                    self.front.argv(script), env=variables, cwd=context, capture_output=True, text=True,
                    timeout=TIMEOUT_S, check=False,
                )  # fmt: skip
                out, err, code = done.stdout, done.stderr, str(done.returncode)
            except subprocess.TimeoutExpired as error:
                out, err = (_text(part) for part in (error.stdout, error.stderr))
                code = f"ended after {TIMEOUT_S} s"
        outcomes = [Outcome(**json.loads(line)) for line in out.splitlines() if line.startswith('{"method"')]
        if code != "0" or not outcomes:
            outcomes.append(Outcome("the client itself", False, f"exit code {code}\n{err[-4000:]}", 0))
        return outcomes

    def example(self, script: str, *arguments: str) -> str:
        """What one of ``examples/`` prints with the newest client, given two variables and the key."""
        argv = [python(f"python-{PYTHONS[-1]}"), ROOT / "examples" / script, *arguments]
        variables = {name: value for name, value in os.environ.items() if name in {"PATH", MARKER}}
        variables |= {"E2B_API_KEY": KEY, "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_all(self, clients: Sequence[tuple[str, ...]], at_once: int = 2) -> dict[str, list[Outcome]]:
        """By client (what ``run`` takes), as it is called in a table."""
        with ThreadPoolExecutor(at_once) as pool:
            outcomes = list(pool.map(lambda client: self.run(*client), clients))
        return {title(*client[:2]): found for client, found in zip(clients, outcomes, strict=True)}


def title(version: str, mode: str) -> str:
    """Of a column."""
    return "JS" if version == "js" else f"{version} {mode}"


def _text(part: str | bytes | None) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else part or ""


@contextmanager
def served(folder: Path, home: Home) -> Iterator[Served]:
    """Until the block ends; the node and what it holds are the caller's."""
    build(folder, home)
    log = folder / "serve.log"
    argv = [sys.executable, "-m", "aenv_run.cli", "serve", "--port", "0", "--domain", DOMAIN]
    variables = environment(home) | {"AENV_API_KEY": KEY}
    with log.open("wb") as sink, subprocess.Popen(argv, cwd=ROOT, env=variables, stderr=sink) as process:
        try:
            end = time.monotonic() + START_S
            while not (match := re.search(r"serving (http://([\d.]+):(\d+))\n", log.read_text())):
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            with front(folder, (match[2], int(match[3]))) as before:
                yield Served(home, match[1], before)
        finally:
            process.terminate()


def rows(outcomes: dict[str, list[Outcome]]) -> list[list[str]]:
    """The table: methods by clients. yes, no, or - where the client has no such method."""
    words = {True: "yes", False: "**no**", None: "–"}
    methods = list(dict.fromkeys(one.method for found in outcomes.values() for one in found))
    by_client = [{one.method: words[one.ok] for one in found} for found in outcomes.values()]
    head = ["method", *outcomes]
    return [head, *([method, *(found.get(method, "–") for found in by_client)] for method in methods)]
