"""Documents of images: index, manifest and config, as registries send them. Untrusted: bounded and checked."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from aenv_run.errors import BaseUnavailable
from aenv_run.snapshot import OWN_LABELS
from aenv_run.text import Labels
from aenv_run.types import Architecture, Context, Digest

#: What registries and their clients allow for each.
MAX_DOCUMENT_BYTES = 4 << 20
MAX_LAYERS = 512
#: From the version without a number to those that need newer CPUs: the least is taken.
_VARIANTS = ("", "v1", "v2", "v3", "v4", "v8", "v9")
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_NO_IMAGE = ("vnd.docker.reference.type",)
#: Labels of an output that say what the image would have run.
LABEL_PREFIX = "aenv.image."
_LABELS: TypeAdapter[dict[str, str]] = TypeAdapter(Labels)


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Platform(_Document):
    """What an entry of an index runs on."""

    os: str = ""
    architecture: str = ""
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class Descriptor(_Document):
    """A pointer to a document or a layer."""

    media_type: str = Field("", alias="mediaType")
    digest: Digest
    size: int = Field(ge=0)
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class Manifest(_Document):
    """An image, or an index of images (``manifests``)."""

    schema_version: int = Field(2, alias="schemaVersion")
    manifests: tuple[Descriptor, ...] | None = Field(None, max_length=4096)
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] | None = Field(None, max_length=MAX_LAYERS)


class RunConfig(_Document):
    """How a container of the image runs."""

    env: tuple[str, ...] | None = Field(None, alias="Env")
    workdir: str | None = Field(None, alias="WorkingDir")
    user: str | None = Field(None, alias="User")
    entrypoint: tuple[str, ...] | None = Field(None, alias="Entrypoint")
    command: tuple[str, ...] | None = Field(None, alias="Cmd")
    exposed_ports: dict[str, object] | None = Field(None, alias="ExposedPorts")
    labels: dict[str, str] | None = Field(None, alias="Labels")

    def context(self) -> Context:
        """How commands run in a sandbox of it."""
        pairs = [line.partition("=") for line in self.env or ()]
        env = {name: value for name, separator, value in pairs if name and separator and "\0" not in name + value}
        workdir = posixpath.normpath("/" + (self.workdir or "").lstrip("/"))
        return Context(env=env, workdir=workdir, user=self.user or "root")

    def kept_labels(self) -> dict[str, str]:
        """Its labels but for those that would pass for ours; and as ours, what we do not run by ourselves."""
        labels = {name: value for name, value in (self.labels or {}).items() if not name.startswith(OWN_LABELS)}
        for name, words in (("entrypoint", self.entrypoint), ("cmd", self.command)):
            if words:
                labels[LABEL_PREFIX + name] = json.dumps(list(words), ensure_ascii=False)
        if self.exposed_ports:
            labels[LABEL_PREFIX + "exposed-ports"] = ",".join(sorted(self.exposed_ports))
        return labels


class RootFs(_Document):
    """The digests of the layers' tars."""

    diff_ids: tuple[Digest, ...] = ()


class Config(_Document):
    """An image's config."""

    os: str = ""
    architecture: str = ""
    variant: str | None = None
    config: RunConfig | None = None
    rootfs: RootFs

    @property
    def platform(self) -> str:
        """As an index would say it."""
        return str(Platform(os=self.os, architecture=self.architecture, variant=self.variant))


def parse_manifest(data: bytes, image: str) -> Manifest:
    """A manifest or an index: one of them, not both."""
    try:
        manifest = Manifest.model_validate_json(_bounded(data, image))
    except ValidationError as error:
        raise damaged(image, "manifest", error) from None
    if manifest.schema_version != 2 or (manifest.manifests is None) == (manifest.layers is None):
        raise BaseUnavailable(
            f"cannot use the image {image}: its manifest is of no known form (schema version "
            f"{manifest.schema_version})",
            fix="push it again with a program of today; images in the form of before 2016 are not supported",
        )
    return manifest


def parse_config(data: bytes, image: str) -> Config:
    """A config of a container image."""
    try:
        config = Config.model_validate_json(_bounded(data, image))
        if config.config is not None:  # a snapshot keeps them
            config.config.context()
            _LABELS.validate_python(config.config.kept_labels())
        return config
    except ValidationError as error:
        raise damaged(image, "config", error) from None


def choose(entries: Sequence[Descriptor], architecture: Architecture, image: str) -> Descriptor:
    """The entry for this machine; attestations and the like are no images."""
    images = [entry for entry in entries if not _is_attestation(entry)]
    ranked = [(rank, entry) for entry in images if (rank := _rank(entry, architecture)) is not None]
    if ranked:
        return min(ranked, key=lambda pair: pair[0])[1]
    platforms = sorted({str(entry.platform) for entry in images if entry.platform})
    raise absent(image, architecture, platforms)


def absent(image: str, architecture: Architecture, platforms: Sequence[str]) -> BaseUnavailable:
    """There is the image, and not for this machine."""
    return BaseUnavailable(
        f"the image {image} has nothing for linux/{architecture}; it has {', '.join(platforms) or 'no images'}",
        fix="name an image that has it, or build on a machine of an architecture that it has",
    )


def damaged(image: str, what: str, error: ValidationError) -> BaseUnavailable:
    """A document that is not what the specification says."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return BaseUnavailable(
        f"cannot use the image {image}: its {what} is damaged or not one of a container image"
        f"{f' ({place})' if place else ''}: {first['msg']}",
        fix="name a container image; push it again if it is one",
    )


def labels_of(pairs: Mapping[str, str], digest: Digest) -> dict[str, str]:
    """The labels, with the digest of the manifest they come from."""
    return {**pairs, LABEL_PREFIX + "digest": digest}


def _bounded(data: bytes, image: str) -> bytes:
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BaseUnavailable(
            f"cannot use the image {image}: a document of it has {len(data)} bytes",
            fix=f"name a container image; its documents have at most {MAX_DOCUMENT_BYTES} bytes",
        )
    return data


def _is_attestation(entry: Descriptor) -> bool:
    annotations = entry.annotations or {}
    unknown = entry.platform is not None and "unknown" in {entry.platform.os, entry.platform.architecture}
    return unknown or any(name in annotations for name in _NO_IMAGE)


def _rank(entry: Descriptor, architecture: Architecture) -> int | None:
    """The lower the better; None is not for this machine."""
    if entry.platform is None or not entry.platform.architecture:
        return len(_VARIANTS) + (entry.media_type in _INDEX_TYPES)  # its own config says what it is for
    if (entry.platform.os or "linux", entry.platform.architecture) != ("linux", architecture):
        return None
    variant = entry.platform.variant or ""
    return _VARIANTS.index(variant) if variant in _VARIANTS else None
