"""Large files in parts, several at once, each checked; an upload that does not end is removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from botocore.exceptions import ClientError

from aenv_run.errors import AenvError, Interrupted, InvalidInput, TooLarge
from aenv_run.stopping import STOP
from aenv_run.store.protocol import StoreKey
from aenv_run.store.s3_errors import changed_on_its_way, code_of, is_precondition
from aenv_run.store.s3_requests import SENDINGS, Mark, S3Requests, Sent

#: What the API allows: parts of an upload, bytes of an object. A single PUT may have 5 GiB and never has here.
MAX_PARTS, MAX_OBJECT_BYTES = 10_000, 5 << 40
PART_BYTES = 16 << 20
AT_ONCE = 4


@dataclass(frozen=True)
class Upload:
    """One multipart upload that has been begun."""

    requests: S3Requests
    key: StoreKey
    id: str

    def send(self, fd: int, number: int, offset: int, length: int) -> str:
        """Store part ``number`` (from 1); its ETag. One part of memory is used."""
        sent = Sent.of(read_exactly(fd, offset, length, self.key))
        for _ in range(SENDINGS):
            answer = self.requests.ask(
                f"storing part {number} of {self.key}",
                lambda client: client.upload_part(
                    Bucket=self.requests.place.bucket,
                    Key=self.requests.name(self.key),
                    UploadId=self.id,
                    PartNumber=number,
                    Body=sent.data,
                    ContentMD5=sent.content_md5,
                ),
            )
            if sent.is_stored(answer["ETag"], answer.get("ServerSideEncryption", "")):
                return answer["ETag"]
        raise changed_on_its_way(f"part {number} of {self.key} in {self.requests.place}")

    def complete(self, etags: dict[int, str], *, exclusive: bool) -> bool | None:
        """Make the object. False if the key was taken meanwhile; None if an earlier try may have made it."""
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        condition = {"IfNoneMatch": "*"} if exclusive else {}
        try:
            self.requests.ask(
                f"completing {self.key}",
                lambda client: client.complete_multipart_upload(
                    Bucket=self.requests.place.bucket,
                    Key=self.requests.name(self.key),
                    UploadId=self.id,
                    MultipartUpload={"Parts": parts},  # type: ignore[typeddict-item]
                    **condition,  # type: ignore[arg-type]
                ),
                expect=lambda error: is_precondition(error) or code_of(error) == "NoSuchUpload",
            )
        except ClientError as error:
            return None if code_of(error) == "NoSuchUpload" else False
        return True

    def abort(self) -> None:
        """Remove its parts; no error when it is gone."""
        with suppress(ClientError):
            self.requests.ask(
                f"removing the unfinished upload of {self.key}",
                lambda client: client.abort_multipart_upload(
                    Bucket=self.requests.place.bucket, Key=self.requests.name(self.key), UploadId=self.id
                ),
                expect=lambda error: code_of(error) == "NoSuchUpload",
            )


def upload_parts(upload: Upload, fd: int, size_bytes: int, part_bytes: int) -> dict[int, str]:
    """Send all of the file; the ETag of each part by number. The first part that fails stops the rest."""
    part_bytes = max(part_bytes, -(-size_bytes // MAX_PARTS))
    offsets = range(0, size_bytes, part_bytes)

    def send(number: int, offset: int) -> str:
        if STOP.asked.is_set():
            raise Interrupted(f"interrupted: part {number} of {upload.key} was not sent")
        return upload.send(fd, number, offset, min(part_bytes, size_bytes - offset))

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="aenv-upload") as pool:
        futures = {pool.submit(send, number, offset): number for number, offset in enumerate(offsets, 1)}
        try:
            return {futures[future]: future.result() for future in as_completed(futures)}
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def begun(requests: S3Requests, key: StoreKey, mark: Mark, size_bytes: int) -> Iterator[Upload]:
    """A new upload. When the block ends it is completed or removed: nothing is left of it but the object."""
    if size_bytes > MAX_OBJECT_BYTES:
        raise TooLarge(f"{key} would have {size_bytes} bytes; an object of S3 has at most {MAX_OBJECT_BYTES}")
    answer = requests.ask(
        f"storing {key}",
        lambda client: client.create_multipart_upload(
            Bucket=requests.place.bucket,
            Key=requests.name(key),
            ContentType="application/octet-stream",
            Metadata=mark.metadata,
        ),
    )
    upload = Upload(requests, key, answer["UploadId"])
    try:
        yield upload
    except BaseException:
        with suppress(AenvError):  # what failed is worth more; `strays` lists what is left
            upload.abort()
        raise


def read_exactly(fd: int, offset: int, length: int, key: StoreKey) -> bytes:
    """That part of the file; ``InvalidInput`` if it has become shorter."""
    pieces: list[bytes] = []
    left = length
    while left:
        data = os.pread(fd, left, offset + length - left)
        if not data:
            raise changed(key)
        pieces.append(data)
        left -= len(data)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def changed(key: StoreKey) -> InvalidInput:
    """The file did not stay as it was."""
    return InvalidInput(
        f"the file that is to be stored as {key} was written while it was stored: it is not sealed",
        fix="stop what writes it, then repeat",
    )
