"""A store in a bucket of any server that speaks S3: the key is the object's name below a prefix.

Exactly one of many writers wins by conditional writes (``If-None-Match``, ``If-Match``). Each write carries a
number of its own as metadata: where an answer is lost and the repeat is refused, the object says whose it is.
"""

from __future__ import annotations

import builtins
import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from botocore.exceptions import ClientError

from aenv_run.errors import CorruptData, InvalidInput, NotFound
from aenv_run.store.identity import FileIdentity
from aenv_run.store.posix_files import as_key, opened_source
from aenv_run.store.protocol import KeyInfo, StoreKey, Stray
from aenv_run.store.s3_answers import Pages
from aenv_run.store.s3_conditions import PROBE_KEY, Conditions, unresolved
from aenv_run.store.s3_errors import changed_on_its_way, is_absent, is_precondition
from aenv_run.store.s3_place import S3Place
from aenv_run.store.s3_read import read_range, reader_of, small
from aenv_run.store.s3_requests import SENDINGS, Mark, Patience, S3Requests, Sent
from aenv_run.store.s3_upload import PART_BYTES, begun, changed, read_exactly, upload_parts

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import PutObjectOutputTypeDef

_ROUNDS = 8


@dataclass(frozen=True)
class _Head:
    info: KeyInfo
    mark: Mark


class S3Store:
    """See ``Store``. Nothing is local. Keys may be below other keys: a bucket has no directories.

    ``lock`` is the file that serializes the writers of this host where the place says that there is only one.
    """

    def __init__(
        self, place: S3Place, *, lock: Path, patience: Patience | None = None, part_bytes: int = PART_BYTES
    ) -> None:
        self.place = place
        self._requests = S3Requests(place, patience or Patience())
        self._conditions = Conditions(self._requests)
        self._lock = lock
        self._part_bytes = part_bytes
        self._bucket_seen = False

    def __repr__(self) -> str:
        return f"S3Store({str(self.place)!r})"

    @property
    def conditional(self) -> bool:
        """See ``Store``."""
        return self.place.writers == "many"

    # Writing

    def put_file(self, key: StoreKey, source: Path, *, consume: bool = False) -> bool:
        """See ``Store``. ``InvalidInput`` if the file was written meanwhile; then nothing was stored."""
        with opened_source(source) as fd:
            before = FileIdentity.of(os.fstat(fd))
            if self.stat(key) is not None:
                return False
            with self._writing():
                if before.size_bytes > self._part_bytes:
                    return self._put_parts(key, fd, before)
                data = read_exactly(fd, 0, before.size_bytes, key)
                if FileIdentity.of(os.fstat(fd)) != before:
                    raise changed(key)
                return self._create(key, data)

    def put_new(self, key: StoreKey, data: bytes) -> bool:
        """See ``Store``."""
        with self._writing():
            return self._create(key, data)

    def swap(self, key: StoreKey, data: bytes, *, expected: bytes | None) -> bool:
        """See ``Store``. ``StoreUnavailable`` if it cannot be known whether it was done."""
        if expected is None:
            return self.put_new(key, data)
        with self._writing():
            for number in range(1, _ROUNDS + 1):
                try:
                    present, answer = small(self._requests, key, len(expected))
                except NotFound:
                    return False
                if present != expected:
                    return False
                mark = Mark.new(answer.mark)
                condition = {"IfMatch": answer.etag} if self.conditional else {}
                won = self._put(key, data, mark, condition)
                if won is not None:
                    return won
                self._requests.pause(number)  # the same bytes under another ETag: written anew meanwhile
        raise unresolved(f"swapping {key} in {self.place}")

    def delete(self, key: StoreKey) -> None:
        """See ``Store``."""
        with self._writing():
            self._requests.ask(
                f"deleting {key}",
                lambda client: client.delete_object(Bucket=self.place.bucket, Key=self._requests.name(key)),
            )

    # Reading

    def read(self, key: StoreKey, *, limit_bytes: int) -> bytes:
        """See ``Store``."""
        data, answer = small(self._requests, key, limit_bytes)
        if data is None:
            raise CorruptData(
                f"{key} in {self.place} has {answer.size_bytes} bytes, "
                f"more than the {limit_bytes} that such an object can have",
                fix="restore the object from a copy",
            )
        return data

    def read_range(self, key: StoreKey, offset: int, length: int) -> bytes:
        """See ``Store``."""
        if offset < 0 or length < 0:
            raise InvalidInput(f"range {offset}+{length} of {key} is negative")
        if length == 0:
            if self.stat(key) is None:
                raise NotFound(f"{key} is not in the store {self.place}")
            return b""
        return read_range(self._requests, key, offset, length)

    @contextmanager
    def open(self, key: StoreKey) -> Iterator[BinaryIO]:
        """See ``Store``."""
        with closing(reader_of(self._requests, key)) as reader:
            yield cast(BinaryIO, reader)

    def stat(self, key: StoreKey) -> KeyInfo | None:
        """See ``Store``. The time has whole seconds."""
        head = self._head(key)
        return head.info if head else None

    def list(self, prefix: str) -> Iterator[KeyInfo]:
        """See ``Store``."""
        for name, size_bytes, modified in self._names(prefix):
            if (key := as_key(name)) is not None:
                yield KeyInfo(key, size_bytes, _seconds(modified))

    def strays(self) -> Iterator[Stray]:
        """See ``Store``. Temporaries are uploads that have not ended."""
        for name, _, _ in self._names(""):
            if name != PROBE_KEY and as_key(name) is None:
                yield Stray("foreign", ascii(name)[1:-1], "has a name that no object has")
        for name, id, begun_at in self._uploads():
            yield Stray(
                "temporary",
                f"{ascii(name)[1:-1]}?uploadId={id}",
                "an upload that goes on or was broken off",
                _seconds(begun_at),
            )

    def clear(self, stray: Stray) -> None:
        """See ``Store``."""
        name, separator, id = stray.path.partition("?uploadId=")
        if stray.kind != "temporary" or not separator:
            raise InvalidInput(f"{stray.path} is no unfinished upload", fix="remove it with the store's own tools")
        self._requests.ask(
            f"removing the unfinished upload {stray.path}",
            lambda client: client.abort_multipart_upload(
                Bucket=self.place.bucket, Key=self._requests.name(name), UploadId=id
            ),
        )

    @property
    def has_files(self) -> bool:
        """See ``Store``."""
        return False

    def local_path(self, key: StoreKey) -> Path | None:
        """See ``Store``."""
        return None

    def require_writable(self) -> None:
        """See ``Store``. ``Unsupported`` where writers could undo each other."""
        with self._writing():
            if not self.conditional:
                self._conditions.require_plain()

    # Pieces

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self.conditional:
            self._conditions.require()
            yield
            return
        self._lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # per open file, so threads of one process exclude each other too
            yield
        finally:
            os.close(fd)

    def _create(self, key: StoreKey, data: bytes) -> bool:
        if not self.conditional and self._head(key) is not None:
            return False
        mark = Mark.new()
        for number in range(1, _ROUNDS + 1):
            won = self._put(key, data, mark, {"IfNoneMatch": "*"} if self.conditional else {})
            if won is not None:
                return won
            self._requests.pause(number)  # it was there and was deleted since
        raise unresolved(f"creating {key} in {self.place}")

    def _put_parts(self, key: StoreKey, fd: int, before: FileIdentity) -> bool:
        if not self.conditional and self._head(key) is not None:
            return False
        mark = Mark.new()
        with begun(self._requests, key, mark, before.size_bytes) as upload:
            etags = upload_parts(upload, fd, before.size_bytes, self._part_bytes)
            if FileIdentity.of(os.fstat(fd)) != before:
                raise changed(key)
            made = upload.complete(etags, exclusive=self.conditional)
            if made:
                return True
            if made is False:
                upload.abort()
            won = self._who_won(key, mark, lost_answer=made is None)
            if won is None:
                raise unresolved(f"storing {key} in {self.place}")
            return won

    def _put(self, key: StoreKey, data: bytes, mark: Mark, condition: dict[str, str]) -> bool | None:
        """False: somebody else has changed it. None: the condition does not hold, but nobody has."""
        sent = Sent.of(data)
        tries = 0

        def put(client: S3Client) -> PutObjectOutputTypeDef:
            nonlocal tries
            tries += 1
            return client.put_object(
                Bucket=self.place.bucket,
                Key=self._requests.name(key),
                Body=sent.data,
                ContentMD5=sent.content_md5,
                ContentType="application/octet-stream",
                Metadata=mark.metadata,
                **condition,  # type: ignore[arg-type]
            )

        for _ in range(SENDINGS):
            try:
                answer = self._requests.ask(
                    f"storing {key}", put, expect=lambda error: is_precondition(error) or is_absent(error)
                )
            except ClientError:
                return self._who_won(key, mark, lost_answer=tries > 1)
            if sent.is_stored(answer["ETag"], answer.get("ServerSideEncryption", "")):
                return True
            condition = {"IfMatch": answer["ETag"]} if self.conditional else {}  # it is ours, and wrong
        raise changed_on_its_way(f"{key} in {self.place}")

    def _who_won(self, key: StoreKey, mark: Mark, *, lost_answer: bool) -> bool | None:
        """After a condition did not hold: whether it was we who had changed it; None if nobody has.

        Also asked where no answer was lost to us: a proxy may have repeated the request.
        """
        head = self._head(key)
        if head is None:
            return None if mark.creates else False
        if mark.nonce in (head.mark.nonce, *head.mark.after):
            return True
        if not mark.creates and mark.stands_on(head.mark):
            return None
        if lost_answer and not head.mark.excludes(mark):
            raise unresolved(f"writing {key} in {self.place}")
        return False

    def _head(self, key: StoreKey) -> _Head | None:
        try:
            found = self._requests.ask(
                f"looking for {key}",
                lambda client: client.head_object(Bucket=self.place.bucket, Key=self._requests.name(key)),
                expect=is_absent,
            )
        except ClientError:
            self._require_bucket()
            return None
        self._bucket_seen = True
        info = KeyInfo(key, found["ContentLength"], _seconds(found["LastModified"]))
        return _Head(info, Mark.of(found.get("Metadata")))

    def _require_bucket(self) -> None:
        """A HEAD does not say whether the key or the bucket is missing."""
        if not self._bucket_seen:
            self._requests.ask(
                "looking for the bucket",
                lambda client: client.list_objects_v2(
                    Bucket=self.place.bucket, Prefix=self._requests.name(""), MaxKeys=1
                ),
            )
            self._bucket_seen = True

    def _names(self, prefix: str) -> Iterator[tuple[str, int, datetime]]:
        """Below ours, in order: name, size, time."""
        ours, token = self._requests.name(""), ""
        pages = Pages(self.place, ours + prefix)
        while True:
            more = {"ContinuationToken": token} if token else {}
            page = self._requests.ask(
                f"listing {prefix or 'everything'}",
                lambda client, more=more: client.list_objects_v2(  # type: ignore[misc]
                    Bucket=self.place.bucket, Prefix=ours + prefix, **more
                ),
            )
            self._bucket_seen = True
            names = pages.names(page, page.get("KeyCount"))
            for name, row in zip(names, page.get("Contents", []), strict=True):
                yield name.removeprefix(ours), row["Size"], row["LastModified"]
            token = page.get("NextContinuationToken", "")
            if not pages.goes_on(page, token):
                return

    def _uploads(self) -> Iterator[tuple[str, str, datetime]]:
        ours, marker = self._requests.name(""), builtins.dict[str, str]()
        pages = Pages(self.place, ours)
        while True:
            page = self._requests.ask(
                "listing unfinished uploads",
                lambda client, marker=marker: client.list_multipart_uploads(  # type: ignore[misc]
                    Bucket=self.place.bucket, Prefix=ours, **marker
                ),
            )
            for name, row in zip(pages.names(page), page.get("Uploads", []), strict=True):
                yield name.removeprefix(ours), row["UploadId"], row["Initiated"]
            if not pages.goes_on(page, page.get("NextKeyMarker"), page.get("NextUploadIdMarker")):
                return
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}


def _seconds(time: datetime) -> float:
    """Whole ones: a HEAD has no more, and a listing must say the same."""
    return float(int(time.timestamp()))
