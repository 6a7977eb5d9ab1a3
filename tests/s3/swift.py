"""OpenStack Swift with its S3 API: one node of five processes, on free ports of loopback, in a directory.

It looks at signatures and has no conditional writes: the store that moto is not. Debian: swift-proxy swift-account
swift-container swift-object memcached.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.s3.server import Server

#: Set by `make soak`, since Swift is 63 packages and takes 10 s to start.
SWIFT = bool(os.environ.get("AENV_SWIFT"))
ACCESS_KEY, SECRET = "test:tester", "testing-of-swift"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
PATH = "/usr/sbin:/sbin:" + os.environ.get("PATH", "")

COMMON = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = root
swift_dir = {etc}
workers = 1
log_udp_host = 127.0.0.1
log_udp_port = 9
"""
STORAGE = """devices = {srv}
mount_check = false
disable_fallocate = true
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
recon_cache_path = {cache}
[{kind}-replicator]
[{kind}-auditor]
"""
PROXY = """[pipeline:main]
pipeline = catch_errors gatekeeper cache s3api tempauth symlink bulk slo dlo versioned_writes proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{memcached}
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
check_bucket_owner = false
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:symlink]
use = egg:swift#symlink
[filter:versioned_writes]
use = egg:swift#versioned_writes
"""
HASH = """[swift-hash]
swift_hash_path_prefix = aenv
swift_hash_path_suffix = aenv
[storage-policy:0]
name = Policy-0
default = yes
"""


@contextmanager
def swift() -> Iterator[Server]:
    """A node of one's own, with a bucket. Its processes are ended and its files removed at the end."""
    root = Path(tempfile.mkdtemp(prefix="aenv-swift-", dir="/var/tmp"))
    try:
        with ExitStack() as stack:
            ports = _configure(root)
            for command in _commands(root, ports):
                stack.enter_context(_running(command, root))
            server = Server(f"http://127.0.0.1:{ports['proxy']}", writers="one")
            _make_bucket(server)
            yield server
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _configure(root: Path) -> dict[str, int]:
    kinds = ("account", "container", "object")
    ports = dict(zip((*kinds, "proxy", "memcached"), _free_ports(5), strict=True))
    etc, srv, cache = root / "etc", root / "srv", root / "cache"
    for directory in (etc, srv / "d1", cache):
        directory.mkdir(parents=True)
    (etc / "swift.conf").write_text(HASH)
    for kind in kinds:
        text = (COMMON + STORAGE).format(port=ports[kind], etc=etc, srv=srv, cache=cache, kind=kind)
        (etc / f"{kind}-server.conf").write_text(text)
        ring = ["swift-ring-builder", f"{kind}.builder"]
        device = ["--region", "1", "--zone", "1", "--ip", "127.0.0.1", "--port", str(ports[kind])]
        for arguments in (
            ["create", "4", "1", "1"],
            ["add", *device, "--device", "d1", "--weight", "1"],
            ["rebalance"],
        ):
            subprocess.run([*ring, *arguments], cwd=etc, check=True, stdout=subprocess.DEVNULL, env=_environment())
    proxy = (COMMON + PROXY).format(port=ports["proxy"], etc=etc, memcached=ports["memcached"], secret=SECRET)
    (etc / "proxy-server.conf").write_text(proxy)
    return ports


def _commands(root: Path, ports: dict[str, int]) -> Iterator[list[str]]:
    yield ["memcached", "-u", "nobody", "-l", "127.0.0.1", "-p", str(ports["memcached"]), "-m", "32"]
    for kind in ("account", "container", "object", "proxy"):
        yield [f"swift-{kind}-server", str(root / "etc" / f"{kind}-server.conf"), "-v"]


@contextmanager
def _running(command: list[str], root: Path) -> Iterator[None]:
    """Each is a parent and a worker: a group of its own, so that both end."""
    with (root / f"{command[0]}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env=_environment(), cwd=root
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": PATH}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


def _make_bucket(server: Server) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET,
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket=server.bucket)
            return
        except (BotoCoreError, ClientError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)
