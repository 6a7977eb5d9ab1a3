"""apt and pip: the command in the sandbox that each of these verbs stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aenv_build.language.verbs import Apt, Pip
from aenv_build.planning.lent import FOLDER
from aenv_run.errors import InvalidInput

MAX_REQUIREMENTS_BYTES = 1 << 20
#: Where a requirements file is while pip reads it.
REQUIREMENTS = f"{FOLDER}/requirements.txt"
APT_LISTS = f"{FOLDER}/lists"
_OTHER_FILES = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable", "./", "../", "file:")

# The lists are packed and in memory: deleted files of a disk would still make its layer larger.
_APT = """
command -v apt-get >/dev/null || { echo "there is no apt-get: apt is for Debian and Ubuntu" >&2; exit 127; }
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then  # no service is started by its installation
    printf '#!/bin/sh\\nexit 101\\n' >$policy; chmod 755 $policy
    trap 'rm -f $policy' EXIT
fi
update=$1 recommends=$2 lists=$3
shift 3
get() {
    if [ $update = true ]; then
        set -- -o Dir::State::lists=$lists -o Acquire::GzipIndexes=true -o Acquire::Languages=none "$@"
    fi
    apt-get -q -y -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 -o APT::Install-Recommends=$recommends \\
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \\
        -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold "$@"
}
if [ $update = true ]; then
    mkdir -p $lists/partial
    get -o APT::Update::Error-Mode=any update
fi
get install -- "$@"
"""
_APT_CLEAN = """
apt-get clean
rm -rf "$1" /var/lib/apt/lists/* /var/cache/apt/*.bin
"""
_PIP = """
python=$1 venv=$2
shift 2
command -v "$python" >/dev/null || {
    echo "there is no $python: install it first, such as apt: [python3]" >&2; exit 127
}
if [ -n "$venv" ]; then
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    python=$venv/bin/python
fi
"$python" -m pip --version >/dev/null 2>&1 || {
    echo "$python has no pip: install it first, such as apt: [python3-pip]" >&2; exit 127
}
exec "$python" -m pip install "$@"
"""


@dataclass(frozen=True)
class Installation:
    """``argv`` installs, ``clean`` removes what was only needed for it. ``user`` None: the context's."""

    argv: tuple[str, ...]
    env: dict[str, str]
    clean: tuple[str, ...] | None = None
    user: str | None = None


def apt(step: Apt) -> Installation:
    """``apt-get install``, asking nothing and starting no service."""
    recommends = "true" if step.recommends else "false"
    update = "true" if step.update else "false"
    argv = ("sh", "-ec", _APT, "apt", update, recommends, APT_LISTS, *step.packages)
    env = {"DEBIAN_FRONTEND": "noninteractive", "DEBCONF_NOWARNINGS": "yes"}
    return Installation(argv, env, ("sh", "-ec", _APT_CLEAN, "clean", APT_LISTS), "root")


def pip(step: Pip, cache: str | None = None) -> Installation:
    """``pip install`` into an interpreter or a virtual environment, its cache in that mount or nowhere."""
    options = [*(("--index-url", step.index) if step.index else ())]
    options += ["-r", REQUIREMENTS] if step.requirements is not None else []
    env = {
        **({"PIP_NO_CACHE_DIR": "1"} if cache is None else {"PIP_CACHE_DIR": cache}),
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        # A sandbox's system Python is there for its tasks; Debian's would refuse.
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
    }
    return Installation(("sh", "-ec", _PIP, "pip", step.python, step.venv or "", *options, *step.packages), env)


def require_alone(requirements: Path) -> None:
    """Refuse a requirements file that names another: only it goes into the sandbox and counts in the key."""
    if not requirements.is_file() or requirements.stat().st_size > MAX_REQUIREMENTS_BYTES:
        raise InvalidInput(f"{requirements.name} is no file of at most {MAX_REQUIREMENTS_BYTES >> 20} MiB")
    for number, line in enumerate(requirements.read_text(errors="replace").splitlines(), start=1):
        if line.strip().startswith(_OTHER_FILES):
            raise InvalidInput(
                f"line {number} of {requirements.name} names another file: {line.strip()[:80]}",
                fix="copy the files and use run: pip install",
            )
