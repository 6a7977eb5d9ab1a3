"""Keys and signatures in the format of minisign (github.com/jedisct1/minisign): each reads what the other wrote.

Ed25519 is the library's; scrypt and BLAKE2b are Python's own. Texts of others are bounded and strictly read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from aenv_run.errors import CorruptData, InvalidInput, Unauthenticated

#: No signature or key is larger: two lines of comment and two of base64.
MAX_TEXT_BYTES = 16 << 10
_MAX_COMMENT, _MAX_TRUSTED = 1024, 8192
_ED, _PREHASHED, _SCRYPT, _PLAIN, _BLAKE = b"Ed", b"ED", b"Sc", b"\0\0", b"B2"
_COMMENT, _TRUSTED = "untrusted comment: ", "trusted comment: "
#: What a new key with a password takes to open: 128 MiB, a second. Keys of minisign take up to 1 GiB.
_OPERATIONS, _MEMORY_BYTES = 1 << 22, 1 << 27
_MAX_MEMORY_BYTES = 1 << 30
_SECRET_BYTES = 104  # key id, seed, public key, checksum


@dataclass(frozen=True)
class PublicKey:
    """Who may have signed. ``id`` tells keys apart, it proves nothing."""

    id: bytes
    key: bytes

    @property
    def name(self) -> str:
        """The key's id as minisign prints it: 16 hex digits in upper case."""
        return key_name(self.id)

    @classmethod
    def parse(cls, text: str, what: str) -> Self:
        """Of a file ``.pub``, or its base64 line alone; ``InvalidInput`` names ``what``."""
        lines = text.strip().splitlines()
        data = _decoded(lines[-1] if len(lines) in (1, 2) and len(text) <= MAX_TEXT_BYTES else "", 42)
        if data is None or data[:2] != _ED:
            raise InvalidInput(f"{what} is no public key of minisign", fix="`aenv catalog keygen FILE` makes one")
        return cls(data[2:10], data[10:])

    def text(self) -> str:
        """As a file ``.pub``."""
        line = base64.b64encode(_ED + self.id + self.key).decode()
        return f"{_COMMENT}minisign public key {self.name}\n{line}\n"


@dataclass(frozen=True)
class SecretKey:
    """What signs. Never shown."""

    public: PublicKey
    seed: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Self:
        """A fresh one."""
        key = Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return cls(PublicKey(secrets.token_bytes(8), public), key.private_bytes_raw())

    def text(self, password: str | None) -> str:
        """As a secret key file; None leaves it open to whoever reads it."""
        plain = self.public.id + self.seed + self.public.key
        plain += hashlib.blake2b(_ED + plain, digest_size=32).digest()
        if password is None:
            head, kept = _ED + _PLAIN + _BLAKE + bytes(48), plain
        else:
            salt = secrets.token_bytes(32)
            sizes = _OPERATIONS.to_bytes(8, "little") + _MEMORY_BYTES.to_bytes(8, "little")
            head = _ED + _SCRYPT + _BLAKE + salt + sizes
            kept = _mixed(plain, password, salt, _OPERATIONS, _MEMORY_BYTES)
        kind = "secret key" if password is None else "encrypted secret key"
        return f"{_COMMENT}minisign {kind}\n{base64.b64encode(head + kept).decode()}\n"

    @classmethod
    def parse(cls, text: str, password: str | None, what: str) -> Self:
        """Of a secret key file. ``Unauthenticated`` for a missing or wrong password."""
        lines = text.strip().splitlines()
        data = _decoded(lines[1] if len(lines) == 2 and len(text) <= MAX_TEXT_BYTES else "", 54 + _SECRET_BYTES)
        if data is None or (data[:2], data[4:6]) != (_ED, _BLAKE) or data[2:4] not in (_SCRYPT, _PLAIN):
            raise InvalidInput(f"{what} is no secret key of minisign", fix="`aenv catalog keygen FILE` makes one")
        kept = data[54:]
        if data[2:4] == _SCRYPT:
            if password is None:
                raise Unauthenticated(f"{what} has a password", fix="give it, on a terminal or in a file")
            operations, memory = (int.from_bytes(data[at : at + 8], "little") for at in (38, 46))
            kept = _mixed(kept, password, data[6:38], operations, memory)
        plain, checksum = kept[:72], kept[72:]
        right = hashlib.blake2b(_ED + plain, digest_size=32).digest()
        if not secrets.compare_digest(checksum, right) and (data[2:4] == _SCRYPT or any(checksum)):
            raise Unauthenticated(f"the password of {what} is another", fix="try again")
        key = cls(PublicKey(plain[:8], plain[40:72]), plain[8:40])
        if key._private().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw) != key.public.key:
            raise InvalidInput(f"{what} is damaged: its halves do not fit", fix="restore it from a copy")
        return key

    def sign(self, data: bytes, comment: str) -> str:
        """A signature file of ``data`` (prehashed, as minisign's own). ``comment``, one line, is signed too."""
        if len(comment) > _MAX_TRUSTED or not comment.isprintable():
            raise InvalidInput("the comment of a signature is one line of at most 8192 characters")
        private = self._private()
        signature = private.sign(hashlib.blake2b(data).digest())
        whole = private.sign(signature + comment.encode())
        line = base64.b64encode(_PREHASHED + self.public.id + signature).decode()
        return (
            f"{_COMMENT}signature of {self.public.name}\n{line}\n"
            f"{_TRUSTED}{comment}\n{base64.b64encode(whole).decode()}\n"
        )

    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)


@dataclass(frozen=True)
class Signature:
    """A signature file, read and not yet believed."""

    key_id: bytes
    prehashed: bool
    signature: bytes
    comment: str
    whole: bytes

    @property
    def key_name(self) -> str:
        """Of the key that it says made it."""
        return key_name(self.key_id)

    @classmethod
    def parse(cls, data: bytes, what: str) -> Self:
        """``CorruptData`` names ``what``."""
        try:
            lines = data.decode().split("\n") if len(data) <= MAX_TEXT_BYTES else []
        except UnicodeDecodeError:
            lines = []
        if len(lines) == 5 and lines[4] == "":
            lines.pop()
        if len(lines) == 4 and lines[0].startswith(_COMMENT) and lines[2].startswith(_TRUSTED):
            made, whole = _decoded(lines[1], 74), _decoded(lines[3], 64)
            comment = lines[2].removeprefix(_TRUSTED)
            right = len(lines[0]) <= _MAX_COMMENT + len(_COMMENT) and len(comment) <= _MAX_TRUSTED
            if made is not None and whole is not None and made[:2] in (_ED, _PREHASHED) and right:
                return cls(made[2:10], made[:2] == _PREHASHED, made[10:], comment, whole)
        raise CorruptData(f"{what} is no signature of minisign", fix="remove it, and sign again")

    def is_of(self, key: PublicKey, data: bytes) -> bool:
        """Whether ``key`` made it, for exactly these bytes, with this comment."""
        if self.key_id != key.id:
            return False
        try:
            public = Ed25519PublicKey.from_public_bytes(key.key)
            public.verify(self.signature, hashlib.blake2b(data).digest() if self.prehashed else data)
            public.verify(self.whole, self.signature + self.comment.encode())
        except (InvalidSignature, ValueError):
            return False
        return True


def key_name(id: bytes) -> str:
    """As minisign prints it."""
    return f"{int.from_bytes(id, 'little'):016X}"


def _decoded(line: str, size_bytes: int) -> bytes | None:
    """Base64 of exactly so many bytes."""
    try:
        data = base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if len(data) == size_bytes else None


def _mixed(data: bytes, password: str, salt: bytes, operations: int, memory_bytes: int) -> bytes:
    """XOR with what the password makes; libsodium's way from its two limits to scrypt's N and p."""
    if not (0 < memory_bytes <= _MAX_MEMORY_BYTES and 0 < operations <= 1 << 26):
        raise InvalidInput("the secret key asks for more memory or work than any key of minisign")
    operations, r = max(operations, 32768), 8
    narrow = operations < memory_bytes // 32
    most = operations // (r * 4) if narrow else memory_bytes // (r * 128)
    power = next(power for power in range(1, 63) if 1 << power > most // 2)
    p = 1 if narrow else max(1, operations // 4 // (1 << power) // r)
    room = (128 * r << power) + 128 * r * p + (1 << 20)
    stream = hashlib.scrypt(password.encode(), salt=salt, n=1 << power, r=r, p=p, maxmem=room, dklen=_SECRET_BYTES)
    return bytes(a ^ b for a, b in zip(data, stream, strict=True))
