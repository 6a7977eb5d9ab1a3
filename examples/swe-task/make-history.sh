#!/bin/sh
# make-history.sh DIRECTORY: builds the task's git repository in DIRECTORY from history/*.patch, and checks that it
# ends in the files of repo/. Authors and dates are fixed, so the commit ids are the same everywhere.
set -eu
[ $# -eq 1 ] || { echo "usage: make-history.sh DIRECTORY" >&2; exit 64; }
here=$(cd "$(dirname "$0")" && pwd)
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
export GIT_COMMITTER_NAME="aenv examples" GIT_COMMITTER_EMAIL=examples@aenv.invalid

mkdir "$1" || { echo "make-history: $1 must not exist yet: remove it, or name another directory" >&2; exit 73; }
git -C "$1" init --quiet --initial-branch=main
git -C "$1" am --quiet --committer-date-is-author-date "$here"/history/*.patch
changed=$(GIT_OPTIONAL_LOCKS=0 git -C "$1" --work-tree="$here/repo" status --porcelain)
[ -z "$changed" ] || {
  printf 'make-history: history/ does not end in the files of repo/, fix one of them:\n%s\n' "$changed" >&2
  exit 65
}
