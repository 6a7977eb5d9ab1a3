"""Whether a store keeps its conditional writes: found by trying, since some take the condition and ignore it."""

from __future__ import annotations

import threading

from botocore.exceptions import ClientError

from aenv_run.errors import StoreUnavailable, Unsupported
from aenv_run.store.s3_errors import is_precondition, is_unknown_to_store, status_of
from aenv_run.store.s3_requests import S3Requests, Sent

#: No key starts with a dot.
PROBE_KEY = ".aenv/conditional-writes"
_TEXT = b"aenv tries here whether this store keeps conditional writes. It may be removed at any time.\n"
_NO_ETAG = '"00000000000000000000000000000000"'


class Conditions:
    """Asks once; a refusal is not remembered, so that a store that was corrected is used."""

    def __init__(self, requests: S3Requests) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        self._kept = False

    def require(self) -> None:
        """``Unsupported`` unless If-None-Match and If-Match are kept."""
        with self._lock:
            if self._kept:
                return
            # The second of two creations fails, the first may: it is there from an earlier time.
            if self._put(IfNoneMatch="*") and self._put(IfNoneMatch="*"):
                raise self._lacking("it takes If-None-Match and overwrites all the same")
            if self._put(IfMatch=_NO_ETAG):
                raise self._lacking("it takes If-Match and overwrites all the same")
            self._kept = True

    def require_plain(self) -> None:
        """Raise unless something can be written, without any condition."""
        self._put()

    def _put(self, **condition: str) -> bool:
        sent = Sent.of(_TEXT)
        try:
            self._requests.ask(
                "trying a conditional write",
                lambda client: client.put_object(
                    Bucket=self._requests.place.bucket,
                    Key=self._requests.name(PROBE_KEY),
                    Body=sent.data,
                    ContentMD5=sent.content_md5,
                    **condition,  # type: ignore[arg-type]
                ),
                expect=lambda error: is_precondition(error) or is_unknown_to_store(error),
            )
        except ClientError as error:
            if is_unknown_to_store(error):
                raise self._lacking(f"it answers {status_of(error)} to them") from None
            return False
        return True

    def _lacking(self, why: str) -> Unsupported:
        return Unsupported(
            f"{self._requests.place} has no conditional writes ({why}), so two writers could undo each other",
            fix="if nobody but this home writes there, say so with writers=one in the URL of the repository; "
            "reading needs nothing",
        )


def unresolved(what: str) -> StoreUnavailable:
    """A conditional write whose answer was lost, and whose place others have overwritten since."""
    return StoreUnavailable(
        f"{what}: the answer was lost, and others have written there since: it is not known whether it was stored",
        fix="look what is there, then repeat if needed",
    )
