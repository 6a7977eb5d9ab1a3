"""Whether an answer is one of S3: a login page with status 200 would else be an empty listing or an object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from aenv_run.errors import InvalidInput, ProtocolError
from aenv_run.printable import printable
from aenv_run.store.s3_place import S3Place

if TYPE_CHECKING:
    from botocore.awsrequest import AWSResponse
    from botocore.model import OperationModel
    from types_boto3_s3 import S3Client

#: What every S3 server says in a good answer.
_TOLD = {
    "ListObjectsV2": ("Name", "IsTruncated"),
    "ListMultipartUploads": ("Bucket", "IsTruncated"),
    "HeadObject": ("ETag", "LastModified", "ContentLength"),
    "GetObject": ("ETag", "ContentLength"),
    "PutObject": ("ETag",),
    "UploadPart": ("ETag",),
    "CreateMultipartUpload": ("UploadId",),
    "CompleteMultipartUpload": ("ETag",),
}
#: So many pages without any key may come one after the other.
_EMPTY_PAGES = 100


def verify_answers(client: S3Client, place: S3Place) -> None:
    """From now on the client raises ``ProtocolError`` at an answer that is none."""

    def answered(
        model: OperationModel, parsed: dict[str, object], http_response: AWSResponse, **_: object
    ) -> None:
        meta = cast(Mapping[str, object], parsed.get("ResponseMetadata", {}))
        if cast(int, meta.get("HTTPStatusCode", 0)) >= 300:
            return
        headers = cast(Mapping[str, str], meta.get("HTTPHeaders", {}))
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        missing = [name for name in _TOLD.get(model.name, ()) if name not in parsed]
        read = model.name in ("GetObject", "HeadObject")  # some servers call the empty answer to a PUT so, too
        if kind == "text/html" and (read or b"<" in http_response.content):
            raise strange(place, f"the answer to {model.name} is a web page")
        if missing:
            raise strange(place, f"the answer to {model.name} has no {' and no '.join(missing)}")

    def redirected(parsed_response: dict[str, object] | None, **_: object) -> None:
        """Without a region botocore would ask again for ever."""
        meta = cast(Mapping[str, object], (parsed_response or {}).get("ResponseMetadata", {}))
        headers = cast(Mapping[str, str], meta.get("HTTPHeaders", {}))
        if meta.get("HTTPStatusCode") in (301, 302, 307) and "x-amz-bucket-region" not in headers:
            raise InvalidInput(
                f"{place}: the store answered {meta['HTTPStatusCode']} and does not say where the bucket is",
                fix="write region=… and endpoint=… as the bucket's owner says",
            )

    client.meta.events.register("after-call.s3", answered)
    client.meta.events.register("response-received.s3.HeadBucket", redirected)


def strange(place: S3Place, why: str) -> ProtocolError:
    """An answer that no S3 server gives."""
    return ProtocolError(
        f"{place}: {why}: this is no answer of an S3 server, and nothing was taken from it",
        fix="look at endpoint=…, and for a proxy or a login page between here and the store",
    )


class Pages:
    """The pages of one listing below ``prefix`` (a name in the bucket): each must continue the one before."""

    def __init__(self, place: S3Place, prefix: str) -> None:
        self._place, self._prefix = place, prefix
        self._tokens: set[tuple[str, ...]] = set()
        self._last: tuple[bytes, ...] = ()
        self._empty = 0

    def names(self, page: Mapping[str, object], told_count: object = None) -> Iterator[str]:
        """Of its ``Contents`` or ``Uploads``, verified."""
        told = page.get("Prefix", "")
        if told != self._prefix and (told or "Bucket" not in page):  # some do not echo that of uploads
            raise self._strange(f"is of {_shown(page.get('Prefix', ''))}")
        rows = cast(list[Mapping[str, object]], page.get("Contents", page.get("Uploads", [])))
        if told_count is not None and told_count != len(rows):
            raise self._strange(f"has {len(rows)} keys and says {told_count}")
        self._empty = 0 if rows else self._empty + 1
        for row in rows:
            if any(name not in row for name in ("Key", "UploadId" if "Uploads" in page else "Size")):
                raise self._strange("has an entry without a key or a size")
            name = str(row["Key"])
            if not name.startswith(self._prefix):
                raise self._strange(f"has {_shown(name)}")
            # Uploads of one key are in the order in which they began.
            here = (name.encode(errors="surrogateescape"),)
            if here < self._last or (here == self._last and "Uploads" not in page):
                raise self._strange(f"has {_shown(name)} out of order")
            self._last = here
            yield name

    def goes_on(self, page: Mapping[str, object], *token: object) -> bool:
        """Whether there is another page, which ``token`` names."""
        if page["IsTruncated"] is not True:
            return False
        words = tuple(str(word or "") for word in token)
        if not words[0]:
            raise self._strange("goes on and does not say where")
        if words in self._tokens or self._empty >= _EMPTY_PAGES:
            raise self._strange("goes round in circles")
        self._tokens.add(words)
        return True

    def _strange(self, why: str) -> ProtocolError:
        return strange(self._place, f"the listing of {_shown(self._prefix)} {why}")


def _shown(name: object) -> str:
    return printable(str(name))[:200] or "everything"
