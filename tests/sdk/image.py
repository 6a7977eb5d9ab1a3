"""The image of the sandboxes: busybox, and of this host bash, git and the Python that runs the code interpreter.

Nothing is bootstrapped: that would take minutes.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

from aenv_run.paths import Home
from tests.e2e.conftest import environment
from tests.e2e.test_build import make_base
from tests.sdk.environments import ROOT, python

#: What E2B's clients launch unless told otherwise; they call the second `code-interpreter-v1`.
NAMES = ("base", "code-interpreter")
USERS = "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:user:/home/user:/bin/bash\n"
GROUPS = "root:x:0:\nuser:x:1000:\n"
PACKAGES = "opt/jupyter"
#: Of Python's own library; tests and tools of its developers are most of it.
LEFT_OUT = re.compile(
    r"(^|/)(test|tests|idlelib|tkinter|turtledemo|ensurepip|lib2to3|pydoc_data|site-packages|dist-packages|"
    r"config-[^/]*|__pycache__|_test[^/]*\.so|_tkinter[^/]*\.so|xxlimited[^/]*\.so)(/|$)"
)
ABOUT = "import json, sys, sysconfig; print(json.dumps([sys._base_executable, sysconfig.get_path('stdlib')]))"


def build(folder: Path, home: Home) -> None:
    """Make the image in ``folder`` and publish it in ``home``, with a kernel that runs, under ``NAMES``."""
    make_base(folder / "root.tar")
    with tarfile.open(folder / "root.tar", "a") as tar:
        _add(tar)
    recipe = {
        "version": 1,
        "name": NAMES[0],
        "base": {"archive": "root.tar"},
        "machine": {"cpus": 1, "memory": "512MiB", "disk": "512MiB"},
        "env": {"PYTHONPATH": f"/{PACKAGES}", "PYTHONDONTWRITEBYTECODE": "1", "FROM_IMAGE": "yes"},
        "steps": [
            {"id": "who", "user": "user"},
            {"id": "where", "workdir": "/home/user"},
            {
                "id": "kernel",
                "start": "exec python3 -m code_interpreter",
                "ready": {"port": 49999},
                "timeout": "3m",
            },
        ],
        "outputs": [{"from": "kernel", "name": name, "tags": ["latest"], "memory": True} for name in NAMES],
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    argv = [sys.executable, "-m", "aenv_build.cli", str(folder / "recipe.yaml"), "--home", str(home.root)]
    done = subprocess.run(
        argv, cwd=ROOT, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")
    (folder / "root.tar").unlink()


def _add(tar: tarfile.TarFile) -> None:
    interpreter = python("jupyter")
    executable, library = json.loads(subprocess.check_output([interpreter, "-c", ABOUT]))
    executable = Path(executable).resolve()
    native = [executable, *_programs("bash", "git")]
    (packages,) = interpreter.parents[1].glob("lib/python3*/site-packages")
    for source, place in ((Path(library), library.lstrip("/")), (packages, PACKAGES)):
        for path in sorted(source.rglob("*")):
            if path.is_file() and not LEFT_OUT.search(str(path.relative_to(source))):
                tar.add(path.resolve(), arcname=f"{place}/{path.relative_to(source)}")
                native += [path] if ".so" in path.name else []
    for path in (ROOT / "examples/code-interpreter/code_interpreter").glob("*.py"):
        tar.add(path, arcname=f"{PACKAGES}/code_interpreter/{path.name}")
    for name in sorted({str(executable), *_libraries(native)}):
        tar.add(Path(name).resolve(), arcname=name.lstrip("/"))
    for program in _programs("bash", "git"):
        tar.add(program, arcname=f"bin/{program.name}")
    _link(tar, "bin/python3", str(executable))
    for name in ("id", "stty", "stat", "ln", "env", "date"):
        _link(tar, f"bin/{name}", "busybox")
    for name in ("git-upload-pack", "git-receive-pack"):
        _link(tar, f"bin/{name}", "git")
    for name, text in (("etc/passwd", USERS), ("etc/group", GROUPS)):
        member = tarfile.TarInfo(name)
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text.encode()))
    member = tarfile.TarInfo("home/user")
    member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, 0o755, 1000, 1000
    tar.addfile(member)


def _programs(*names: str) -> list[Path]:
    found = [shutil.which(name) for name in names]
    return [Path(path).resolve() for path in found if path is not None]


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    tar.addfile(member)


def _libraries(files: Iterable[Path]) -> set[str]:
    """What they are linked with, but for what lies among the packages itself."""
    listing = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    return {name for name in re.findall(r"(/\S+) \(0x", listing) if "site-packages" not in name}
