"""When a started command counts as up."""

from __future__ import annotations

from urllib.parse import urlsplit

from aenv_build.language.verbs import Ready
from aenv_build.planning.plan import argv
from aenv_run.errors import CommandTimeout, Unsupported
from aenv_run.guest import Command, Guest
from aenv_run.types import Context

READY_TIMEOUT_S = 30.0
#: Of the script below: the image has nothing to ask with.
NOTHING_ASKS = 127

# Exit code 0: the status is 200 to 399. A proxy is for the world outside.
_ASK = """
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
url=$1 host=$2 port=$3 path=$4
if command -v curl >/dev/null; then
    code=$(curl -s -k -o /dev/null -m 10 -w '%{http_code}' "$url") || exit 1
elif command -v python3 >/dev/null; then
    exec python3 -c 'import ssl, sys, urllib.error, urllib.request as u
class Stay(u.HTTPRedirectHandler):
    def redirect_request(self, *a): return None
o = u.build_opener(Stay, u.ProxyHandler({}), u.HTTPSHandler(context=ssl._create_unverified_context()))
try: code = o.open(sys.argv[1], timeout=10).status
except urllib.error.HTTPError as e: code = e.code
except OSError: sys.exit(1)
sys.exit(not 200 <= code < 400)' "$url"
elif command -v wget >/dev/null; then
    wget -q -T 10 -O /dev/null "$url" && exit 0
    [ $? -lt 128 ] || exit 127  # a static one that the image's libraries crash
    exit 1
elif command -v bash >/dev/null && [ "${url#http:}" != "$url" ]; then
    code=$(bash -c 'exec 3<>"/dev/tcp/$1/$2" || exit 1
        printf "GET %s HTTP/1.0\\r\\nHost: %s\\r\\n\\r\\n" "$3" "$1" >&3
        read -t 10 -r _ code _ <&3; echo "$code"' bash "$host" "$port" "$path" 2>/dev/null) || exit 1
else
    exit 127
fi
case $code in [23][0-9][0-9]) exit 0 ;; esac
exit 1
"""


async def is_ready(ready: Ready, guest: Guest, context: Context) -> bool:
    """Ask once. ``Unsupported`` where the image has nothing to ask with."""
    if ready.url is not None:
        return await _answers(ready.url, guest)
    if ready.command is not None:
        words = argv(ready.command, "sh")
        command = Command(words, env=context.env, cwd=context.workdir, user=context.user)
        try:
            return (await guest.run(command, timeout_s=READY_TIMEOUT_S)).exit_code == 0
        except CommandTimeout:
            return False
    tables = await guest.run(
        Command(("cat", "/proc/net/tcp", "/proc/net/tcp6"), cwd="/"), timeout_s=READY_TIMEOUT_S
    )
    return listens(tables.stdout.decode(errors="replace"), ready.port or 0)


async def _answers(url: str, guest: Guest) -> bool:
    try:
        command = Command(("sh", "-c", *script(url)), cwd="/", user="root")
        found = await guest.run(command, timeout_s=READY_TIMEOUT_S)
    except CommandTimeout:
        return False
    if found.exit_code == NOTHING_ASKS:
        raise Unsupported(
            "cannot ask a URL: the image has no curl, python3, wget or bash that works",
            fix="install one of them, or say ready: {port: …} or a command",
        )
    return found.exit_code == 0


def script(url: str) -> tuple[str, ...]:
    """For ``sh -c``: asks the URL once."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = parts.path or "/"
    return (_ASK, "ready", url, parts.hostname or "", str(port), f"{path}?{parts.query}" if parts.query else path)


def listens(table: str, port: int) -> bool:
    """Whether /proc/net/tcp has a listening socket (state 0A) on the port."""
    rows = (line.split() for line in table.splitlines())
    return any(len(row) > 3 and row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)
