"""As much of S3 as a repository asks for, over a directory, fast with ranges of large files: for measuring a link.

``python -m tests.perf.file_s3 DIRECTORY ADDRESS PORT``. It checks no credentials.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LOCK = threading.Lock()


class FileS3(BaseHTTPRequestHandler):
    """``/bucket/key`` is the file ``key`` of the directory."""

    protocol_version = "HTTP/1.1"
    root: Path

    def _path(self) -> Path:
        key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]
        if ".." in key.split("/"):
            raise PermissionError(key)
        return self.root / key

    def _bucket(self) -> str:
        return urlsplit(self.path).path.lstrip("/").partition("/")[0]

    def do_HEAD(self) -> None:
        self._give(body=False)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
        elif "uploads" in query:
            told = f"<Bucket>{self._bucket()}</Bucket><IsTruncated>false</IsTruncated>"
            self._say(200, f"<ListMultipartUploadsResult>{told}</ListMultipartUploadsResult>".encode())
        else:
            self._give(body=True)

    def do_PUT(self) -> None:
        data = self._body()
        with LOCK:
            path = self._path()
            wanted = self.headers.get("If-Match")
            is_there = path.is_file()
            if (is_there and self.headers.get("If-None-Match") == "*") or (
                wanted is not None and (not is_there or wanted != etag(path))
            ):
                self._say(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            self._say(200, b"", ETag=etag(path))

    def do_DELETE(self) -> None:
        with LOCK:
            self._path().unlink(missing_ok=True)
        self._say(204, b"")

    def _body(self) -> bytes:
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        data = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return data

    def _give(self, *, body: bool) -> None:
        path = self._path()
        if not path.is_file():
            self._say(404, b"<Error><Code>NoSuchKey</Code></Error>" if body else b"")
            return
        size = path.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(found[1]), min(size, int(found[2] or size) + 1)) if found else (0, size)
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        for name, value in (
            ("Content-Length", str(end - start)),
            ("ETag", etag(path)),
            ("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True)),
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.flush()
            with path.open("rb") as file:
                while start < end:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), start, min(end - start, 1 << 20))
                    if sent == 0:
                        return
                    start += sent

    def _list(self, prefix: str) -> None:
        rows = []
        for path in sorted(self.root.rglob("*")):
            key = path.relative_to(self.root).as_posix()
            if path.is_file() and key.startswith(prefix):
                rows.append(
                    f"<Contents><Key>{key}</Key><Size>{path.stat().st_size}</Size>"
                    f"<ETag>{etag(path)}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        told = f"<Name>{self._bucket()}</Name><Prefix>{prefix}</Prefix><KeyCount>{len(rows)}</KeyCount>"
        told += f"<IsTruncated>false</IsTruncated>{''.join(rows)}"
        self._say(200, f"<ListBucketResult>{told}</ListBucketResult>".encode())

    def _say(self, code: int, data: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def etag(path: Path) -> str:
    """Changes with the file."""
    found = path.stat()
    return f'"{found.st_mtime_ns:x}-{found.st_size:x}"'


def main() -> None:
    """Serve until ended."""
    directory, address, port = sys.argv[1:]
    FileS3.root = Path(directory)
    server = ThreadingHTTPServer((address, int(port)), FileS3)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
