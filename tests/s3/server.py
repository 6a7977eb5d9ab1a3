"""moto's S3 server as a process of its own: ``python -m tests.s3.server`` prints its port and serves until ended.

Conditional writes are made one at a time: moto looks and then writes, which is not atomic in its threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aenv_run.store.s3_place import S3Place

BUCKET, REGION = "aenv-tests", "us-east-1"
#: moto asks for some credentials and checks none.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key-of-the-test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}


@dataclass(frozen=True)
class Server:
    """A running server and a bucket in it."""

    endpoint: str
    bucket: str = BUCKET
    writers: str = "many"

    def place(self, prefix: str, *, writers: str = "") -> S3Place:
        """A prefix of the bucket."""
        return S3Place.parse(self.url(prefix, writers=writers))

    def url(self, prefix: str, *, writers: str = "") -> str:
        """The URL of a repository there."""
        query = f"region={REGION}&endpoint={self.endpoint}&writers={writers or self.writers}"
        return f"s3://{self.bucket}/{prefix}?{query}"


@contextmanager
def moto() -> Iterator[Server]:
    """A server of one's own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.s3.server"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "moto's server ended at once"
        yield Server(f"http://127.0.0.1:{int(line)}")
    finally:
        process.kill()
        process.wait()


def _serve() -> None:
    os.environ.update(CREDENTIALS)
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if "HTTP_IF_MATCH" in environ or "HTTP_IF_NONE_MATCH" in environ or environ["REQUEST_METHOD"] == "DELETE":
            with lock:
                return list(app(environ, start_response))
        return app(environ, start_response)  # type: ignore[no-any-return]

    s3_backends["123456789012"]["aws"].create_bucket(BUCKET, REGION)
    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
