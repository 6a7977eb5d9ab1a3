"""What a builder lends to steps with a network: a proxy, certificates and package indexes of its own place.

They are settings of the builder, not of the recipe: given for the time of a step as environment and as files in
memory, so that neither a layer nor a context nor a key knows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from aenv_run.errors import AenvError, InvalidInput
from aenv_run.guest import Command, Guest

PREFIX = "AENV_BUILD_"
#: /run is memory in every sandbox.
FOLDER = "/run/aenv-build"
CERTIFICATES = f"{FOLDER}/ca.pem"
APT_CONFIG = f"{FOLDER}/apt.conf"
APT_FOLDER = f"{FOLDER}/apt"
MAX_BUNDLE_BYTES = 8 << 20
SETUP_TIMEOUT_S = 60.0

_COPY_SOURCES = """
mkdir -p "$1/sources.list.d" "$1/lists/partial"
shift_to=$1; shift
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    [ -f "$file" ] || continue
    sed -E "$@" "$file" >"$shift_to/${file#/etc/apt/}"
done
"""


@dataclass(frozen=True)
class Lent:
    """Settings ``AENV_BUILD_*`` of the builder's environment; nothing is lent by default."""

    proxy: str | None = None
    no_proxy: str | None = None
    certificates: bytes | None = None
    pip_index: str | None = None
    apt_mirrors: tuple[str, ...] = ()
    npm_registry: str | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Those of the environment; ``InvalidInput`` names the setting that cannot be right."""
        values = os.environ if environ is None else environ
        return cls(
            proxy=_url(values, "PROXY"),
            no_proxy=values.get(f"{PREFIX}NO_PROXY") or None,
            certificates=_bundle(values),
            pip_index=_url(values, "PIP_INDEX"),
            apt_mirrors=_mirrors(values),
            npm_registry=_url(values, "NPM_REGISTRY"),
        )

    def serves(self, verb: str) -> bool:
        """Whether a step of that verb works without the internet: its index is lent."""
        return bool({"pip": self.pip_index, "apt": self.apt_mirrors}.get(verb))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that steps must reach, by name or address."""
        urls = (self.proxy, self.pip_index, *self.apt_mirrors, self.npm_registry)
        return tuple(dict.fromkeys(urlsplit(url).hostname or "" for url in urls if url))

    def hosts_for(self, verb: str) -> tuple[str, ...]:
        """Hosts of a step that is given its index and no internet."""
        urls = {"pip": (self.pip_index,), "apt": self.apt_mirrors}.get(verb, ())
        return tuple(dict.fromkeys(urlsplit(url).hostname or "" for url in urls if url))

    @property
    def passwords(self) -> tuple[str, ...]:
        """What must not be shown: passwords in the URLs, as written and decoded."""
        urls = (self.proxy, self.pip_index, *self.apt_mirrors, self.npm_registry)
        found = [urlsplit(url).password for url in urls if url]
        return tuple(dict.fromkeys(text for one in found if one for text in (one, unquote(one))))

    def without_passwords(self) -> Self:
        """Only what may stay in unused pages of a machine whose memory is captured."""

        def plain(url: str | None) -> str | None:
            return url if url is None or urlsplit(url).password is None else None

        mirrors = tuple(mirror for mirror in self.apt_mirrors if plain(mirror))
        return replace(
            self,
            proxy=plain(self.proxy),
            pip_index=plain(self.pip_index),
            apt_mirrors=mirrors,
            npm_registry=plain(self.npm_registry),
        )

    @property
    def environment(self) -> dict[str, str]:
        """Variables that programs of the field know."""
        env: dict[str, str] = {}
        if self.proxy:
            names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
            env |= dict.fromkeys(names, self.proxy)
            env |= dict.fromkeys(("no_proxy", "NO_PROXY"), self.no_proxy or "localhost,127.0.0.1")
        if self.certificates is not None:
            env |= dict.fromkeys(_CERTIFICATE_VARIABLES, CERTIFICATES)
        if self.pip_index:
            env |= {"PIP_INDEX_URL": self.pip_index, "UV_DEFAULT_INDEX": self.pip_index}
            if (parts := urlsplit(self.pip_index)).scheme == "http" and parts.hostname:
                env["PIP_TRUSTED_HOST"] = parts.hostname
        if self.npm_registry:
            env |= {"npm_config_registry": self.npm_registry, "npm_config_omit_lockfile_registry_resolved": "true"}
        if self._apt_config:
            env["APT_CONFIG"] = APT_CONFIG
        return env

    @property
    def source_changes(self) -> tuple[str, ...]:
        """For ``sed -E``: every apt source whose path ends as a mirror's does is the mirror's."""
        return tuple(map(_replacement, self.apt_mirrors))

    @property
    def _apt_config(self) -> str:
        lines = []
        if self.certificates is not None:
            lines.append(f'Acquire::https::CaInfo "{CERTIFICATES}";')
        if self.apt_mirrors:  # the lists are named after the mirror, so they stay in memory too
            lines += [
                f'Dir::Etc::sourcelist "{APT_FOLDER}/sources.list";',
                f'Dir::Etc::sourceparts "{APT_FOLDER}/sources.list.d";',
                f'Dir::State::lists "{APT_FOLDER}/lists";',
                'Dir::Cache::pkgcache "";',
                'Dir::Cache::srcpkgcache "";',
            ]
        return "".join(f"{line}\n" for line in lines)

    @asynccontextmanager
    async def given(self, guest: Guest) -> AsyncIterator[dict[str, str]]:
        """The environment for a command, with the files that it names in the guest; they are gone afterwards."""
        if not self.environment:
            yield {}
            return
        try:
            await self._put_files(guest)
            yield self.environment
        except BaseException:
            with suppress(AenvError):
                await guest.remove(FOLDER, user="root")
            raise
        await guest.remove(FOLDER, user="root")

    async def _put_files(self, guest: Guest) -> None:
        if self.certificates is not None:
            await guest.write_file(CERTIFICATES, self.certificates, user="root")
        if self._apt_config:
            await guest.write_file(APT_CONFIG, self._apt_config.encode(), user="root")
        if self.apt_mirrors:
            expressions = [part for change in self.source_changes for part in ("-e", change)]
            command = Command(
                ("sh", "-ec", _COPY_SOURCES, "sources", APT_FOLDER, *expressions), cwd="/", user="root"
            )
            await guest.run(command, timeout_s=SETUP_TIMEOUT_S)


_CERTIFICATE_VARIABLES = (
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "PIP_CERT",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "npm_config_cafile",
    "CARGO_HTTP_CAINFO",
)


def _replacement(mirror: str) -> str:
    last = _last_part(mirror).replace(".", r"\.")
    target = re.sub(r"([&\\#])", r"\\\1", mirror.rstrip("/"))
    return rf"s#https?://[^[:space:]]*/{last}/?([[:space:]]|$)#{target}\1#g"


def _last_part(mirror: str) -> str:
    return urlsplit(mirror).path.rstrip("/").rpartition("/")[2]


def _mirrors(values: Mapping[str, str]) -> tuple[str, ...]:
    found = tuple(_checked(mirror, "APT_MIRROR") for mirror in (values.get(f"{PREFIX}APT_MIRROR") or "").split())
    for mirror in found:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", _last_part(mirror)):
            raise InvalidInput(
                f"{PREFIX}APT_MIRROR: a mirror replaces the sources whose path ends as its own does",
                fix="write http://host/debian http://host/debian-security, one for each archive",
            )
    return found


def _url(values: Mapping[str, str], name: str) -> str | None:
    return _checked(value, name) if (value := values.get(PREFIX + name)) else None


def _checked(value: str, name: str) -> str:
    try:
        parts = urlsplit(value)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and value.isprintable()
        valid = valid and not re.search(r"[\s'\"]", value) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise InvalidInput(f"{PREFIX}{name} is no URL", fix="write http://host:port/path, or https://")
    return value


def _bundle(values: Mapping[str, str]) -> bytes | None:
    path = values.get(f"{PREFIX}CA_BUNDLE")
    if not path:
        return None
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{PREFIX}CA_BUNDLE: cannot read {path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in content or len(content) > MAX_BUNDLE_BYTES:
        raise InvalidInput(
            f"{PREFIX}CA_BUNDLE: {path} is no PEM file with certificates, or too large",
            fix="name the bundle that this host's own programs use",
        )
    return content
