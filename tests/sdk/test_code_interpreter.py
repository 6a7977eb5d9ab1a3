"""The code interpreter's server and its kernels, on this host."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.images import free_port
from tests.sdk.environments import ROOT, python

Line = dict[str, object]
WAIT_S = 120.0


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Of the kernels' user; short, since their sockets' names are."""
    with tempfile.TemporaryDirectory(prefix="aenv-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    """Of a server on loopback."""
    port = free_port()
    environment = {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONPATH": str(ROOT / "examples/code-interpreter"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    argv: list[str | Path] = [python("jupyter"), "-m", "code_interpreter", str(port)]
    base = f"http://127.0.0.1:{port}"
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(argv, env=environment, cwd=home, stdout=log, stderr=log) as server,
        httpx.Client(base_url=base, timeout=WAIT_S, trust_env=False) as client,
    ):
        try:
            end = time.monotonic() + WAIT_S
            while True:
                try:
                    assert client.get("/health").status_code == 200
                    break
                except httpx.TransportError:
                    assert server.poll() is None and time.monotonic() < end, (home / "log").read_text()
                    time.sleep(0.05)
            yield client
        finally:
            server.terminate()
    assert server.returncode == 0 and not list(home.glob("kernels-*")), (home / "log").read_text()


@pytest.fixture
def context(client: httpx.Client, home: Path) -> Iterator[str]:
    """One of its own, in a directory of its own."""
    (home / "there").mkdir(exist_ok=True)
    made = client.post("/contexts", json={"cwd": "there"}).json()
    assert made == {"id": made["id"], "language": "python", "cwd": str(home / "there")}
    yield made["id"]
    client.delete(f"/contexts/{made['id']}")


def run(client: httpx.Client, code: str, **more: object) -> list[Line]:
    """The lines of a cell, but for the last, which is always the same."""
    answer = client.post("/execute", json={"code": code, **more})
    assert answer.status_code == 200, answer.text
    lines: list[Line] = [json.loads(line) for line in answer.text.splitlines()]
    assert lines.pop() == {"type": "end_of_execution"}
    return lines


def result(client: httpx.Client, code: str, **more: object) -> Line:
    """The value of a cell's last line."""
    (found,) = [line for line in run(client, code, **more) if line.get("is_main_result")]
    return found


def test_what_a_cell_shows(client: httpx.Client) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); kept = 40; 'te' 'xt'"
    count, *lines = run(client, code)
    assert count["type"] == "number_of_executions" and isinstance(count["execution_count"], int)
    shown = {str(line["type"]): line for line in lines}
    assert shown["stdout"]["text"] == "out\n" and shown["stderr"]["text"] == "err\n"
    timestamp = shown["stdout"]["timestamp"]
    assert isinstance(timestamp, int) and abs(timestamp / 1e9 - time.time()) < WAIT_S
    assert shown["result"] == {"type": "result", "is_main_result": True, "text": "text"}
    assert result(client, "kept + 2")["text"] == "42"
    assert result(client, "{'a': [1, None]}")["json"] == {"a": [1, None]}
    assert result(client, "[float('nan'), -float('inf'), 1]")["json"] == [None, None, 1]
    assert result(client, "{'a': {1}}").keys() == {"type", "is_main_result", "text"}


def test_every_kind_of_result(client: httpx.Client) -> None:
    kinds = {"text/html": "<b>", "image/png": "QQ==", "image/svg+xml": "<svg/>", "text/markdown": "*m*"}
    kinds |= {"text/latex": "$x$", "application/javascript": "1", "text/plain": "p", "application/x-own": "o"}
    _, line = run(client, f"from IPython.display import display; display({kinds!r}, raw=True)")
    assert line == {
        "type": "result", "is_main_result": False, "html": "<b>", "png": "QQ==", "svg": "<svg/>",
        "markdown": "*m*", "latex": "$x$", "javascript": "1", "text": "p", "extra": {"application/x-own": "o"},
    }  # fmt: skip


def test_an_error_is_one(client: httpx.Client) -> None:
    _, line = run(client, "def f():\n    return 1 / 0\nf()")
    assert (line["type"], line["name"], line["value"]) == ("error", "ZeroDivisionError", "division by zero")
    assert "return 1 / 0" in str(line["traceback"]) and "\x1b" not in str(line["traceback"])
    _, line = run(client, "input()")
    assert line["name"] == "StdinNotImplementedError"


def test_what_is_no_text_stalls_nothing(client: httpx.Client, context: str) -> None:
    lines = run(client, "print('a\\ud800'); '\\udfff'", context_id=context)
    assert [line["text"] for line in lines[1:]] == ["a\ud800\n", "\\udfff"]
    assert result(client, "6 * 7", context_id=context)["text"] == "42"
    odd = b'{"code": "\'\\ud800\'"}'
    answer = client.post("/execute", content=odd, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "surrogate" in answer.text


def test_variables_hold_for_one_cell(client: httpx.Client) -> None:
    value = 'it\'s "so"\nand \\ so'
    code = "import os; os.environ.get('MINE') == " + repr(value)
    assert result(client, code, env_vars={"MINE": value})["text"] == "True"
    assert result(client, "os.environ.get('MINE') is None")["text"] == "True"
    _, line = run(client, "1 / 0", env_vars={"MINE": value})
    assert line["name"] == "ZeroDivisionError"
    assert result(client, "os.environ.get('MINE') is None")["text"] == "True"


def test_contexts_have_their_own_state(client: httpx.Client, context: str, home: Path) -> None:
    assert result(client, "mine = 1; import os; os.getcwd()", context_id=context)["text"] == str(home / "there")
    assert context in [one["id"] for one in client.get("/contexts").json()]
    assert run(client, "mine")[1]["name"] == "NameError"
    assert client.post(f"/contexts/{context}/restart").is_success
    assert run(client, "mine", context_id=context)[1]["name"] == "NameError"
    assert result(client, "6 * 7", context_id=context)["text"] == "42"
    assert client.delete(f"/contexts/{context}").is_success
    assert client.post("/execute", json={"code": "1", "context_id": context}).status_code == 404
    assert client.delete(f"/contexts/{context}").status_code == 404


def test_a_default_context_that_was_removed_is_made_anew(client: httpx.Client) -> None:
    run(client, "mine = 1")
    (first, *_) = client.get("/contexts").json()
    assert client.delete(f"/contexts/{first['id']}").is_success
    assert run(client, "mine", language="python3")[1]["name"] == "NameError"


def test_a_client_that_goes_away_interrupts_its_cell(client: httpx.Client, context: str) -> None:
    code = "import time; count = 0\nwhile True:\n    count += 1; time.sleep(0.01)"
    with client.stream("POST", "/execute", json={"code": code, "context_id": context}) as answer:
        assert "number_of_executions" in next(answer.iter_lines())
    assert result(client, "count > 0", context_id=context)["text"] == "True"


def test_a_kernel_that_ends_is_started_again(client: httpx.Client, context: str) -> None:
    lines = run(client, "import os; os._exit(3)", context_id=context)
    assert lines[-1]["name"] == "ContextRestarting"
    assert run(client, "os", context_id=context)[1]["name"] == "NameError"


def test_a_context_is_restarted_while_its_cell_runs(client: httpx.Client, context: str) -> None:
    with client.stream("POST", "/execute", json={"code": "while True: pass", "context_id": context}) as answer:
        lines = answer.iter_lines()
        assert "number_of_executions" in next(lines)
        assert client.post(f"/contexts/{context}/restart").is_success
        assert json.loads(next(lines))["name"] == "ContextRestarting"
    assert result(client, "6 * 7", context_id=context)["text"] == "42"


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/execute", {"code": "1", "language": "bash"}, 400, "no kernel for 'bash'; it has kernels for: python"),
        ("/execute", {"code": "1", "language": "r", "context_id": "a"}, 400, "Only one of"),
        ("/execute", {"code": "1", "context_id": "a"}, 404, "Context a not found"),
        ("/execute", {"code": 1}, 400, "code must be text"),
        ("/execute", {"code": "1", "env_vars": {"A": 1}}, 400, "env_vars"),
        ("/execute", {"code": "1", "env_vars": {"A=B": "1"}}, 400, "env_vars"),
        ("/execute", {"code": "1", "env_vars": {"": "1"}}, 400, "env_vars"),
        ("/execute", {"code": "1", "env_vars": {"A": "x\0y"}}, 400, "env_vars"),
        ("/execute", [], 400, "object"),
        ("/contexts", {"cwd": "missing"}, 400, "is no directory"),
        ("/contexts", {"language": "cobol"}, 400, "no kernel for 'cobol'"),
    ],
)
def test_what_cannot_be_is_refused(client: httpx.Client, path: str, body: object, status: int, said: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
