"""Base from a container image: which one a name means today, and its layers as a directory tree.

A registry is asked for documents by name or digest, each verified by its digest. What a digest names is kept, so
an image pinned by digest is resolved without a network. An OCI layout is read where it is. A docker archive has
neither manifest nor digests of its own: those that skopeo derives from its layers count.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from aenv_build.bases.archive import LayerFile, require_root, unpack_layers
from aenv_build.bases.image_documents import (
    MAX_DOCUMENT_BYTES,
    Config,
    Descriptor,
    Manifest,
    RunConfig,
    absent,
    choose,
    labels_of,
    parse_config,
    parse_manifest,
)
from aenv_build.bases.skopeo import Skopeo
from aenv_build.language.image_reference import ImageReference
from aenv_run.digest import digest_bytes
from aenv_run.errors import BaseUnavailable
from aenv_run.types import Architecture, Context, Digest

#: An index may point at indexes; nobody nests them deeper.
MAX_INDEXES = 4
MAX_KEPT_BYTES = 512 << 10
#: Layers together may have twice the machine's disk (later ones replace files of earlier ones) and their headers.
MAX_HEADERS_BYTES = 1 << 30
_REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class ResolvedImage:
    """An image by digest: its name has done its work."""

    reference: ImageReference
    manifest_digest: Digest
    layers: tuple[Descriptor, ...]
    config: Config

    @property
    def run_config(self) -> RunConfig:
        """How a container of it would run."""
        return self.config.config or RunConfig()

    @property
    def context(self) -> Context:
        """How commands run in a sandbox of it."""
        return self.run_config.context()

    @property
    def labels(self) -> dict[str, str]:
        """What outputs keep of its config."""
        return labels_of(self.run_config.kept_labels(), self.manifest_digest)


@dataclass(frozen=True)
class ImageSource:
    """Where a recipe's image comes from. ``kept``: a directory for documents, each named by its digest."""

    reference: ImageReference
    kept: Path
    first_wait_s: float = field(default=1.0)

    @property
    def _shown(self) -> str:
        return self.reference.text

    async def resolve(self, architecture: Architecture) -> ResolvedImage:
        """Which image the name means for this machine; ``BaseUnavailable`` says why there is none."""
        self.kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = await self._first()
        for _ in range(MAX_INDEXES):
            manifest = parse_manifest(content, self._shown)
            if manifest.manifests is None:
                return await self._image(content, manifest, architecture)
            content = await self._document(choose(manifest.manifests, architecture, self._shown).digest)
        raise BaseUnavailable(
            f"cannot use the image {self._shown}: indexes are nested deeper than {MAX_INDEXES}",
            fix="name a container image",
        )

    async def digest(self) -> Digest:
        """Of the document that the name means today, which pins it: of an index, for all its architectures."""
        self.kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.reference.pin is not None:
            return self.reference.pin
        return digest_bytes(await self._first())

    def _require_small(self, image: ResolvedImage) -> ResolvedImage:
        """A snapshot keeps the labels and the environment: they must fit in its manifest."""
        if len(json.dumps([image.labels, image.context.env])) > MAX_KEPT_BYTES:
            raise BaseUnavailable(
                f"cannot use the image {self._shown}: its labels and environment have more than "
                f"{MAX_KEPT_BYTES >> 10} KiB",
                fix="build the image again with fewer labels",
            )
        return image

    async def _image(self, content: bytes, manifest: Manifest, architecture: Architecture) -> ResolvedImage:
        digest = digest_bytes(content)
        assert manifest.layers is not None
        if manifest.config is None:
            raise BaseUnavailable(
                f"cannot use the image {self._shown}: it has no config", fix="name a container image"
            )
        config = parse_config(await self._config(digest, manifest.config.digest), self._shown)
        if (config.os or "linux", config.architecture or architecture) != ("linux", architecture):
            raise absent(self._shown, architecture, [config.platform])
        if len(config.rootfs.diff_ids) != len(manifest.layers):
            raise BaseUnavailable(
                f"cannot use the image {self._shown}: it has {len(manifest.layers)} layers, and its config names "
                f"{len(config.rootfs.diff_ids)}",
                fix="name a container image; push it again if it is one",
            )
        return self._require_small(ResolvedImage(self.reference, digest, manifest.layers, config))

    async def _first(self) -> bytes:
        """The document that the name itself means."""
        reference = self.reference
        if reference.pin is not None:
            return await self._document(reference.pin)
        if reference.transport == "oci":
            return await self._document(_layout_entry(reference))
        return await self._skopeo().manifest(reference)

    async def _document(self, digest: Digest) -> bytes:
        if self.reference.transport == "oci":
            return _read_blob(self.reference, digest)
        if (kept := self._recall(digest)) is not None:
            return kept
        return self._verified(await self._skopeo().manifest(self.reference, digest), digest)

    async def _config(self, manifest_digest: Digest, digest: Digest) -> bytes:
        if self.reference.transport == "oci":
            return _read_blob(self.reference, digest)
        if (kept := self._recall(digest)) is not None:
            return kept
        return self._verified(await self._skopeo().config(self.reference, manifest_digest), digest)

    def _skopeo(self) -> Skopeo:
        return Skopeo(self.kept, self.first_wait_s)

    def _recall(self, digest: Digest) -> bytes | None:
        try:
            data = (self.kept / digest.hex).read_bytes()
        except OSError:
            return None
        return data if digest_bytes(data) == digest else None

    def _verified(self, data: bytes, digest: Digest) -> bytes:
        """Keep what has the right digest."""
        if digest_bytes(data) != digest:
            raise _wrong_digest(self._shown, digest, digest_bytes(data))
        descriptor, name = tempfile.mkstemp(dir=self.kept)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(self.kept / digest.hex)
        return data


async def make_image_tree(image: ResolvedImage, scratch: Path, tree: Path, *, disk_mib: int) -> None:
    """Fetch the layers into ``scratch`` (which is removed) and unpack them into the new ``tree``."""
    reference = image.reference
    require_root()
    total_bytes = sum(layer.size for layer in image.layers)
    if total_bytes > 2 * (disk_mib << 20) + MAX_HEADERS_BYTES:
        raise BaseUnavailable(
            f"the image {reference.text} has {total_bytes >> 20} MiB of layers, far more than fits on the "
            f"machine's disk of {disk_mib} MiB",
            fix="give the machine a larger disk, or name a smaller image",
        )
    try:
        if reference.transport == "oci":
            folder = _blobs(reference)
        else:
            scratch.mkdir(mode=0o700)
            folder = scratch / "blobs"
            limit = max([MAX_DOCUMENT_BYTES, *(layer.size for layer in image.layers)])
            skopeo = Skopeo(scratch)
            await skopeo.copy(reference, image.manifest_digest, folder, max_file_bytes=limit)
        layers = []
        for layer, diff_id in zip(image.layers, image.config.rootfs.diff_ids, strict=True):
            path = folder / layer.digest.hex
            if not path.is_file():
                raise BaseUnavailable(
                    f"the image {reference.text} lacks its layer {layer.digest}",
                    fix="copy or save the image again",
                )
            layers.append(LayerFile(path, layer.digest, diff_id))
        await unpack_layers(layers, tree, disk_mib=disk_mib, workdir=image.context.workdir, image=reference.text)
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, True)


def _blobs(reference: ImageReference) -> Path:
    return Path(reference.place) / "blobs" / "sha256"


def _layout_entry(reference: ImageReference) -> Digest:
    """The digest that an OCI layout has under the name, or its only one."""
    index = parse_manifest(_read(reference, Path(reference.place) / "index.json"), reference.text)
    entries = index.manifests or ()
    names = [(entry.annotations or {}).get(_REF_NAME) for entry in entries]
    found = [entry for entry, name in zip(entries, names, strict=True) if reference.tag in {None, name}]
    if len({entry.digest for entry in found}) == 1:
        return found[0].digest
    known = sorted({name for name in names if name})
    raise BaseUnavailable(
        f"the OCI layout of {reference.text} has {len(found)} images"
        + (f" named {reference.tag!r}" if reference.tag else ", so one must be named"),
        fix=f"write oci:FOLDER:NAME with one of its names: {', '.join(known) or 'none'}",
    )


def _read_blob(reference: ImageReference, digest: Digest) -> bytes:
    data = _read(reference, _blobs(reference) / digest.hex)
    if digest_bytes(data) != digest:
        raise _wrong_digest(reference.text, digest, digest_bytes(data))
    return data


def _read(reference: ImageReference, path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "not a file")
        with path.open("rb") as file:
            return file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise BaseUnavailable(
            f"cannot read the image {reference.text}: {path}: {error.strerror}",
            fix="give a folder with an OCI layout (index.json, blobs/), as 'skopeo copy … oci:FOLDER:NAME' makes",
        ) from None


def _wrong_digest(image: str, wanted: Digest, found: Digest) -> BaseUnavailable:
    return BaseUnavailable(
        f"the image {image} sent a document with the digest {found} for {wanted}",
        fix="build again; if it stays so, the registry, the file or a proxy on the way is broken",
    )
