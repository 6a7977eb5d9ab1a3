"""Names of container images as recipes write them: the transports of skopeo that a base may come from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from aenv_run.errors import InvalidInput
from aenv_run.types import Digest

Transport: TypeAlias = Literal["docker", "oci", "docker-archive"]

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_FORMS = "docker://HOST/NAME:TAG, docker://HOST/NAME@sha256:…, oci:FOLDER:TAG or docker-archive:FILE:NAME:TAG"
MAX_LENGTH = 1024


@dataclass(frozen=True)
class ImageReference:
    """A parsed name. ``place``: the repository of a registry, or a path relative to the recipe.

    ``tag`` is the tag, or the name that a file holds the image under. ``pin`` is the digest that it must have.
    """

    text: str
    transport: Transport
    place: str
    tag: str | None = None
    pin: Digest | None = None

    @property
    def host(self) -> str:
        """The registry, for messages and logins."""
        first, slash, _ = self.place.partition("/")
        return first if slash and (re.search(r"[.:]", first) or first == "localhost") else "docker.io"

    def pinned(self, digest: Digest) -> ImageReference:
        """The same, bound to that digest. In a file the name stays: it says which image the digest is of."""
        tag = None if self.transport == "docker" else self.tag
        return ImageReference(self.text, self.transport, self.place, tag, digest)

    def at(self, folder: Path) -> ImageReference:
        """The same with its path made absolute; a registry's stays as it is."""
        if self.transport == "docker":
            return self
        return ImageReference(self.text, self.transport, str(folder / self.place), self.tag, self.pin)


def parse_image(text: str) -> ImageReference:
    """Parse; ``ValueError`` says what is wrong."""
    if len(text) > MAX_LENGTH or not text.isprintable():
        raise ValueError("the name of an image is one line of at most 1024 characters")
    if text.startswith("docker://"):
        return _in_registry(text, text.removeprefix("docker://"))
    for transport in ("oci", "docker-archive"):
        if text.startswith(transport + ":"):
            place, _, tag = text.removeprefix(transport + ":").partition(":")
            if not place:
                break
            return ImageReference(text, "oci" if transport == "oci" else "docker-archive", place, tag or None)
    raise ValueError(f"{text!r} is not an image: write {_FORMS}")


def _in_registry(text: str, name: str) -> ImageReference:
    name, at, pinned = name.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = name, ""
    if not _REPOSITORY.fullmatch(repository) or (colon and repository != name and not tag):
        raise ValueError(f"{text!r} is not an image of a registry: write {_FORMS}")
    if tag and not _TAG.fullmatch(tag):
        raise ValueError(f"{tag!r} is not a tag of an image")
    try:
        pin = Digest(pinned) if at else None
    except InvalidInput as error:
        raise ValueError(error.message) from None
    # With a digest the tag is for people: the digest alone says which image it is.
    return ImageReference(text, "docker", repository, None if pin else tag or "latest", pin)
