"""Container images made by hand, a real registry on loopback, and a proxy before it that fails on purpose."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from aenv_run.types import Digest
from tests.cases.image_layers import Entry, tar_of

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG = "application/vnd.oci.image.config.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"


class Pointer(TypedDict):
    """A descriptor."""

    mediaType: str
    digest: Digest
    size: int


def digest(data: bytes) -> Digest:
    """sha256."""
    return Digest(f"sha256:{hashlib.sha256(data).hexdigest()}")


@dataclass
class Layout:
    """An OCI layout that is written by hand."""

    folder: Path
    entries: list[dict[str, object]] = field(default_factory=list)

    def put(self, data: bytes, media_type: str) -> Pointer:
        """A blob."""
        blobs = self.folder / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        (blobs / digest(data).hex).write_bytes(data)
        return {"mediaType": media_type, "digest": digest(data), "size": len(data)}

    def document(self, value: Mapping[str, object], media_type: str) -> Pointer:
        """A JSON blob."""
        return self.put(json.dumps(value).encode(), media_type)

    def image(
        self,
        *layers: Sequence[Entry],
        config: Mapping[str, object] | None = None,
        architecture: str = "amd64",
    ) -> Pointer:
        """The manifest of an image of these layers, the lowest first."""
        tars = [tar_of(*entries) for entries in layers]
        pointers = [self.put(gzip.compress(tar, mtime=0), LAYER) for tar in tars]
        rootfs = {"type": "layers", "diff_ids": [digest(tar) for tar in tars]}
        about = {"architecture": architecture, "os": "linux", "config": config or {}, "rootfs": rootfs}
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.document(about, CONFIG),
            "layers": pointers,
        }
        return self.document(manifest, MANIFEST)

    def index(self, *entries: Mapping[str, object]) -> Pointer:
        """An index of images."""
        return self.document({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}, INDEX)

    def name(self, name: str | None, pointer: Pointer) -> Pointer:
        """Put an entry in index.json."""
        annotations = {"annotations": {REF_NAME: name}} if name else {}
        self.entries.append({**pointer, **annotations})
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.entries}))
        return pointer


def on(pointer: Pointer, architecture: str, **platform: str) -> dict[str, object]:
    """The entry of an index for a platform."""
    return {**pointer, "platform": {"os": "linux", "architecture": architecture, **platform}}


def attestation(pointer: Pointer) -> dict[str, object]:
    """An entry as BuildKit adds one for each image."""
    notes = {"vnd.docker.reference.type": "attestation-manifest"}
    return {**pointer, "platform": {"os": "unknown", "architecture": "unknown"}, "annotations": notes}


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_settings(home: Path, *hosts: str, mirrors: Mapping[str, str] | None = None) -> None:
    """registries.conf of the user: these hosts speak HTTP; ``mirrors`` maps a registry to one of them."""
    lines = [f'[[registry]]\nlocation = "{host}"\ninsecure = true\n' for host in hosts]
    for name, mirror in (mirrors or {}).items():
        lines.append(
            f'[[registry]]\nlocation = "{name}"\n[[registry.mirror]]\nlocation = "{mirror}"\ninsecure = true\n'
        )
    folder = home / ".config" / "containers"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "registries.conf").write_text("\n".join(lines))


@contextmanager
def registry(folder: Path, *, htpasswd: str = "") -> Iterator[str]:
    """Debian's docker-registry on loopback; its host:port."""
    program = shutil.which("docker-registry")
    assert program is not None, "scripts/setup installs docker-registry"
    host = f"127.0.0.1:{free_port()}"
    settings: dict[str, object] = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": host},
    }
    if htpasswd:
        (folder / "htpasswd").write_text(htpasswd)
        settings["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
    (folder / "config.yml").write_text(json.dumps(settings))
    argv = ["setpriv", "--pdeathsig", "KILL", "--", program, "serve", str(folder / "config.yml")]
    with (folder / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            _wait_for(host)
            yield host
        finally:
            process.kill()


def _wait_for(host: str) -> None:
    end = time.monotonic() + 30
    while True:
        with suppress(OSError):
            connection = http.client.HTTPConnection(host, timeout=5)
            connection.request("GET", "/v2/")
            connection.getresponse().read()
            connection.close()
            return
        assert time.monotonic() < end, f"no registry answers on {host}"
        time.sleep(0.05)


@dataclass
class Fault:
    """What the proxy does with requests whose path contains ``path``, ``times`` times."""

    path: str
    status: int = 0
    cut_at: int | None = None
    body: bytes | None = None
    until: threading.Event | None = None
    times: int = 1 << 30
    reached: threading.Event = field(default_factory=threading.Event)


class Proxy(http.server.ThreadingHTTPServer):
    """Before a registry: passes requests on, but for its faults."""

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.faults: list[Fault] = []
        self.asked: list[str] = []

    @property
    def host(self) -> str:
        """Its host:port."""
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        self.server.asked.append(self.path)
        fault = next((one for one in self.server.faults if one.path in self.path and one.times > 0), None)
        if fault is not None:
            fault.times -= 1
            fault.reached.set()
            if fault.until is not None:
                fault.until.wait(60)
        if fault is not None and fault.status:
            self.send_response(fault.status)
            self.send_header("Retry-After", "1")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():  # several of one name, such as Accept
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if fault is not None and fault.body is not None:
            data = fault.body
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault is not None and fault.cut_at is not None:
            self.wfile.write(data[: fault.cut_at])
            self.wfile.flush()
            self.close_connection = True
            return
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """A proxy that fails where it is told to."""
    server = Proxy(upstream)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def skopeo(*argv: str) -> str:
    """Run skopeo; its output."""
    done = subprocess.run(["skopeo", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
