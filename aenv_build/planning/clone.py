"""git: the command in the sandbox that a checkout stands for."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from aenv_build.language.verbs import Git
from aenv_build.planning.install import Installation

_CLONE = """
limit=
url=$1 wanted=$2 to=$3 depth=$4 submodules=$5 pinned=$6
command -v git >/dev/null || {
    echo "there is no git: install it first, such as apt: [git, ca-certificates]" >&2; exit 127
}
if [ -e "$to" ] && [ -n "$(ls -A "$to")" ]; then echo "$to is there and not empty" >&2; exit 1; fi
mkdir -p "$to"
cd "$to"
git init -q .
git remote add origin "$url"
[ "$depth" = 0 ] || limit="--depth $depth"
if [ "$pinned" = false ]; then
    git fetch -q --no-tags $limit origin "$wanted"
    wanted=$(git rev-parse 'FETCH_HEAD^{commit}')
# Not every server gives a commit by its id: then all branches and tags are fetched.
elif [ -z "$limit" ] || ! git fetch -q --no-tags $limit origin "$wanted"; then
    git fetch -q --tags origin '+refs/heads/*:refs/remotes/origin/*'
fi
git checkout -q --detach "$wanted"
found=$(git rev-parse HEAD)
[ "$found" = "$wanted" ] || { echo "$url gave $found, not the commit $wanted" >&2; exit 1; }
[ "$submodules" = false ] || git submodule update -q --init --recursive --depth 1
git log -1 --format='%H %s'
"""
_PASSWORD = """!f() { [ "$1" = get ] && echo username=x-access-token && printf 'password=%s\\n' "$NAME"; }; f"""


def git(step: Git, to: str, secrets: Sequence[str]) -> Installation:
    """A repository at one commit, checked to be that one. One secret is the password of its host over HTTP."""
    settings = {"init.defaultBranch": "main", "advice.detachedHead": "false"}
    parts = urlsplit(step.url)
    if len(secrets) == 1 and parts.scheme in {"http", "https"}:
        settings[f"credential.{parts.scheme}://{parts.netloc}.helper"] = _PASSWORD.replace("NAME", secrets[0])
    env = {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    submodules = "true" if step.submodules else "false"
    wanted, pinned = (step.commit, "true") if step.commit is not None else (step.ref or "", "false")
    argv = ("sh", "-ec", _CLONE, "git", step.url, wanted, to, str(step.depth), submodules, pinned)
    return Installation(argv, env)
