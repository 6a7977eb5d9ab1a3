"""Who vouches for a snapshot: signatures of its manifest, and the keys of which one is required.

A signature is of the manifest's canonical bytes, and these name every other byte by its digest. Names and tags are
not signed: docs/signing.md says what that means.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from aenv_run.digest import canonical_json
from aenv_run.errors import AenvError, Conflict, CorruptData, InvalidInput, NotFound, Untrusted, from_os
from aenv_run.minisign import MAX_TEXT_BYTES, PublicKey, SecretKey, Signature
from aenv_run.store import Store, StoreKey
from aenv_run.types import SnapshotId

if TYPE_CHECKING:
    from aenv_run.repository import Repository

VARIABLE = "AENV_REQUIRE_SIGNATURE"
#: More keys than that nobody looks after, and more signatures of a snapshot no reader looks at.
MAX_KEYS, MAX_SIGNATURES = 64, 64


@dataclass(frozen=True)
class Signed:
    """One signature that a store has of a snapshot; ``problem`` where it is none."""

    key_name: str
    data: bytes
    signature: Signature | None
    problem: str = ""


@dataclass(frozen=True)
class Trust:
    """Keys of which one must have signed."""

    keys: tuple[PublicKey, ...]

    @classmethod
    def of_files(cls, paths: Iterable[str]) -> Self:
        """Public keys in files, and all ``*.pub`` of directories; ``InvalidInput`` when that is none."""
        keys = [PublicKey.parse(_text(path), str(path)) for named in paths for path in _files(Path(named))]
        if not 0 < len(keys) <= MAX_KEYS:
            raise InvalidInput(
                f"{len(keys)} public keys are given for the required signature, not 1 to {MAX_KEYS}",
                fix=f"name a file .pub, or a directory with some ({VARIABLE}, --require-signature)",
            )
        return cls(tuple(keys))

    @classmethod
    def of_texts(cls, texts: Sequence[str]) -> Self | None:
        """Of what ``texts`` gives; None for none."""
        return cls(tuple(PublicKey.parse(text, "a required key") for text in texts)) if texts else None

    @property
    def texts(self) -> tuple[str, ...]:
        """For a wire."""
        return tuple(key.text() for key in self.keys)

    def signer(self, store: Store, id: SnapshotId, manifest: bytes) -> PublicKey | None:
        """The first of the keys that signed this manifest, and that is in the store."""
        return next((key for key in self.keys if _is_by(key, store, id, manifest)), None)

    def accepts(self, signatures: Iterable[Signature], manifest: bytes) -> bool:
        """Whether one of these, from anywhere, is by one of the keys."""
        return any(one.is_of(key, manifest) for one in signatures for key in self.keys)

    def refuse(self, id: SnapshotId) -> Untrusted:
        """The error for a snapshot that none of them signed."""
        names = ", ".join(key.name for key in self.keys)
        return Untrusted(
            f"snapshot {id} has no valid signature of a required key ({names}); nothing of it was used",
            fix=f"have it signed: aenv catalog sign {id.short} --key FILE; or name other keys: {VARIABLE}",
        )


def required() -> Trust | None:
    """What $AENV_REQUIRE_SIGNATURE names (files and directories with colons between); None where it is empty.

    ``InvalidInput`` when a name in it is empty, as of ``$A:$B`` where neither is set: that is no "none".
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return None
    named = value.split(os.pathsep)
    if not all(named):
        raise InvalidInput(
            f"{VARIABLE} is {value[:200]!r}, which has an empty name in it", fix="name a key in each place"
        )
    return Trust.of_files(named)


def require_signed(repository: Repository, id: SnapshotId, asked: Trust | None = None) -> None:
    """``Untrusted`` unless one of the repository's required keys signed it, and one of those asked for."""
    for trust in (repository.trust, asked):
        if trust is None:
            continue
        if trust.signer(repository.store, id, canonical_json(repository.snapshot(id))) is None:
            raise trust.refuse(id)


def is_trusted(repository: Repository, id: SnapshotId) -> bool:
    """For builders: whether it may be built on, as what they committed themselves may in any case."""
    if id in repository.own:
        return True
    with suppress(Untrusted):
        require_signed(repository, id)
        return True
    return False


def signature_key(id: SnapshotId, key_name: str) -> StoreKey:
    """Where the signature of a snapshot by that key is."""
    return StoreKey(f"signatures/{id[:2]}/{id}/{key_name}")


def sign(store: Store, id: SnapshotId, manifest: bytes, key: SecretKey, comment: str = "") -> Signature:
    """Sign and keep it, in place of an older one of the same key."""
    data = key.sign(manifest, f"aenv snapshot {id}" + (f" {comment}" if comment else "")).encode()
    _put(store, signature_key(id, key.public.name), data)
    return Signature.parse(data, "the new signature")


def keep(store: Store, id: SnapshotId, data: bytes, what: str, *, replace: bool = False) -> Signature:
    """Keep a signature that was made elsewhere, as it is. That it is of this snapshot nobody has verified yet."""
    signature = Signature.parse(data, what)
    place = signature_key(id, signature.key_name)
    if replace:
        _put(store, place, data)
    else:
        store.put_new(place, data)
    return signature


def signatures_of(store: Store, id: SnapshotId) -> Iterator[Signed]:
    """Those that a store has, in order of their keys' names, at most ``MAX_SIGNATURES``. None is believed yet."""
    prefix = f"signatures/{id[:2]}/{id}/"
    for count, info in enumerate(store.list(prefix)):
        if count >= MAX_SIGNATURES:
            return
        name = info.key.removeprefix(prefix)
        try:
            data = store.read(info.key, limit_bytes=MAX_TEXT_BYTES)
            signature = Signature.parse(data, f"{info.key}")
            if signature.key_name != name:
                raise CorruptData(f"{info.key} is by another key: {signature.key_name}", fix="remove it")
            yield Signed(name, data, signature)
        except NotFound:
            continue
        except AenvError as error:
            yield Signed(name, b"", None, error.message)


def _is_by(key: PublicKey, store: Store, id: SnapshotId, manifest: bytes) -> bool:
    place = signature_key(id, key.name)
    try:
        data = store.read(place, limit_bytes=MAX_TEXT_BYTES)
        return Signature.parse(data, place).is_of(key, manifest)
    except (NotFound, CorruptData):
        return False


def _put(store: Store, place: StoreKey, data: bytes) -> None:
    for _ in range(10):
        if store.put_new(place, data):
            return
        try:
            before = store.read(place, limit_bytes=MAX_TEXT_BYTES)
        except NotFound:
            continue
        except CorruptData:  # too long to be one: what is there counts for nobody
            store.delete(place)
            continue
        if before == data or store.swap(place, data, expected=before):
            return
    raise Conflict(f"{place} is being written by others all the time", fix="try again")


def _files(named: Path) -> list[Path]:
    path = named.expanduser()
    return sorted(path.glob("*.pub")) if path.is_dir() else [path]


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES + 1).decode(errors="replace")
    except OSError as error:
        raise from_os(error, "cannot read a required key") from error
