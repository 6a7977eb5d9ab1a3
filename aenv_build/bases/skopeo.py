"""skopeo, which speaks to registries and reads docker archives, and what its failures mean.

Credentials, mirrors, certificates and plain HTTP are its own settings: containers-auth.json(5) (it falls back to
docker's config.json), containers-registries.conf(5), containers-certs.d(5).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv_build.bases.image_documents import MAX_DOCUMENT_BYTES
from aenv_build.language.image_reference import ImageReference
from aenv_run import process
from aenv_run.errors import BaseUnavailable, CommandTimeout, MissingDependency, NoSpace
from aenv_run.types import Digest

#: skopeo itself waits up to about a minute where a registry says that there were too many requests.
DOCUMENT_TIMEOUT_S = 600.0
LAYERS_TIMEOUT_S = 3600.0
ATTEMPTS = 3
FIRST_WAIT_S = 1.0
MAX_SHOWN = 400


@dataclass(frozen=True)
class Meaning:
    """What a failure says, to whom it is known by, and whether another attempt may succeed."""

    pattern: str
    why: str
    fix: str
    passing: bool = False


#: A number alone may be a tag, a size or a time: a status says that it is one, or has its words.
_STATUS = r"\bstatus(?: ?code)?[: ]+"
_LOGIN = "log in with 'skopeo login {host}' or 'docker login {host}', as the user who builds"
#: Of any source. The first that matches counts.
_OF_THE_HOST = (
    Meaning(r"no space left", "the disk is full", "free some space"),
    Meaning(
        r"file too large",
        "it sent more than the manifest says",
        "build again; if it stays so, the registry, the file or a proxy on the way is broken",
    ),
)
_OF_A_FILE = (
    *_OF_THE_HOST,
    Meaning(
        r"",
        "the file is not there, is damaged, packed (.tar.gz) or has no image of that name",
        "give a plain tar, as of 'docker save'; 'skopeo list-tags docker-archive:FILE' lists its names",
    ),
)
_OF_A_REGISTRY = (
    *_OF_THE_HOST,
    Meaning(
        rf"toomanyrequests|too many requests|{_STATUS}429\b",
        "the registry allows no more requests now (429)",
        "wait and build again; who is logged in may have more, and a mirror helps (docs/recipe.md, Registries)",
    ),
    Meaning(
        rf"unauthorized|authentication required|invalid username/password|{_STATUS}401\b",
        "the registry refuses without the right login (401)",
        _LOGIN,
    ),
    Meaning(rf"denied|forbidden|{_STATUS}403\b", "this login may not read it (403)", _LOGIN),
    Meaning(
        rf"manifest unknown|name unknown|manifest_unknown|name_unknown|not found|{_STATUS}404\b",
        "the registry has no such image, tag or layer (404)",
        "check the name and the tag; a private image may be hidden: " + _LOGIN,
    ),
    Meaning(
        r"server gave HTTP response to HTTPS client",
        "the registry speaks HTTP, not HTTPS",
        "if you trust its network, say 'insecure = true' for it in registries.conf (docs/recipe.md, Registries)",
    ),
    Meaning(
        r"x509|certificate",
        "the registry's certificate is not trusted here",
        "put its authority's certificate in /etc/containers/certs.d/{host}/ca.crt",
    ),
    Meaning(
        r"digest did not match|does not match|doesn't match|mismatch|unexpected digest",
        "the registry sent something else than the digest says",
        "build again; if it stays so, the registry or a proxy on the way is broken",
    ),
    Meaning(
        r"unexpected EOF|: EOF|connection reset|broken pipe|stream error|timeout|deadline exceeded"
        rf"|{_STATUS}50[0234]\b|bad gateway|internal server error|unavailable|content-length"
        r"|stopped after \d+ redirects",
        "the transfer broke off",
        "build again; if it stays so, check the network, the proxy (HTTPS_PROXY) and the registry",
        passing=True,
    ),
    Meaning(
        r"no such host|server misbehaving|connection refused|network is unreachable|no route to host",
        "the registry {host} cannot be reached",
        "check the name, the network and the proxy (HTTPS_PROXY)",
        passing=True,
    ),
)


class _Passing(Exception):
    """A failure that another attempt may not have."""

    def __init__(self, error: BaseUnavailable) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True)
class Skopeo:
    """The program. ``scratch``: where it may put large temporary files. ``first_wait_s`` doubles each time."""

    scratch: Path
    first_wait_s: float = FIRST_WAIT_S

    async def manifest(self, image: ImageReference, digest: Digest | None = None) -> bytes:
        """The manifest or index as it is, byte by byte."""
        return await self._run(image, ["inspect", "--raw", _name(image, digest)], DOCUMENT_TIMEOUT_S)

    async def config(self, image: ImageReference, digest: Digest) -> bytes:
        """The config of the image whose manifest has that digest."""
        argv = ["inspect", "--raw", "--config", _name(image, digest)]
        return await self._run(image, argv, DOCUMENT_TIMEOUT_S)

    async def copy(self, image: ImageReference, digest: Digest, target: Path, *, max_file_bytes: int) -> None:
        """All blobs of the image into the directory ``target``, named by the hex digits of their digests."""
        argv = ["copy", "--quiet", _name(image, digest), f"dir:{target}"]
        try:
            await self._run(image, argv, LAYERS_TIMEOUT_S, max_file_bytes=max_file_bytes, target=target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    async def _run(
        self,
        image: ImageReference,
        arguments: Sequence[str],
        timeout_s: float,
        *,
        max_file_bytes: int = 64 << 30,
        target: Path | None = None,
    ) -> bytes:
        if shutil.which("skopeo") is None:
            raise MissingDependency("skopeo is not installed, which fetches images", fix="apt-get install skopeo")
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Passing),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=self.first_wait_s, max=30),
            reraise=True,
        )
        # A registry that sends without end fills no disk: the kernel stops a file at that size.
        limited = ["prlimit", f"--fsize={max_file_bytes}", "skopeo", *arguments]
        argv = ["setpriv", "--pdeathsig", "KILL", "--", *limited]
        try:
            async for attempt in retrying:
                with attempt:
                    if target is not None:
                        shutil.rmtree(target, ignore_errors=True)
                    return await self._once(image, argv, timeout_s)
        except _Passing as passing:
            error = passing.error
            raise BaseUnavailable(f"{error.message} (tried {ATTEMPTS} times)", fix=error.fix) from None
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, image: ImageReference, argv: Sequence[str], timeout_s: float) -> bytes:
        environment = {**os.environ, "TMPDIR": str(self.scratch), "LC_ALL": "C.UTF-8"}
        try:
            done = await process.run(
                argv, timeout_s=timeout_s, env=environment, limit_bytes=2 * MAX_DOCUMENT_BYTES
            )
        except CommandTimeout:
            raise BaseUnavailable(
                f"cannot get the image {image.text}: skopeo did not end within {timeout_s:.0f} s",
                fix="check the network and the registry, then build again",
            ) from None
        if done.exit_code == 0:
            return done.stdout
        raise failure(image, done.stderr.decode(errors="replace"))


def failure(image: ImageReference, said: str) -> Exception:
    """The error for what skopeo said; ``_Passing`` around it where another attempt may succeed."""
    lines = [line for line in said.strip().splitlines() if line]
    found = re.search(r'msg="((?:[^"\\]|\\.)*)"', lines[-1]) if lines else None
    text = re.sub(r"\\(.)", r"\1", found[1]) if found else (lines[-1] if lines else "skopeo said nothing")
    shown = text if len(text) <= MAX_SHOWN else "…" + text[-MAX_SHOWN:]
    # The image's own name must not decide what its failure means.
    reason = text.replace(image.place, "").replace(image.text, "")
    for meaning in _OF_A_REGISTRY if image.transport == "docker" else _OF_A_FILE:
        if re.search(meaning.pattern, reason, re.IGNORECASE):
            why, fix = meaning.why.format(host=image.host), meaning.fix.format(host=image.host)
            message = f"cannot get the image {image.text}: {why}; skopeo says: {shown}"
            if meaning is _OF_THE_HOST[0]:
                return NoSpace(message, fix=fix)
            error = BaseUnavailable(message, fix=fix)
            return _Passing(error) if meaning.passing else error
    return BaseUnavailable(
        f"cannot get the image {image.text}: skopeo says: {shown}",
        fix="try 'skopeo inspect' with the same name, as the user who builds",
    )


def _name(image: ImageReference, digest: Digest | None) -> str:
    if image.transport == "docker":
        return f"docker://{image.place}" + (f"@{digest}" if digest else f":{image.tag}")
    return f"{image.transport}:{image.place}" + (f":{image.tag}" if image.tag else "")
