"""What a store's refusals mean, and what to do about them. No message repeats a secret or a signed URL."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)

from aenv_run.errors import (
    AenvError,
    CorruptData,
    InvalidInput,
    NoSpace,
    NotFound,
    StoreUnavailable,
    TooLarge,
    Unauthenticated,
    Unsupported,
)
from aenv_run.printable import printable
from aenv_run.store.s3_place import S3Place

_PASSING_STATUS = {408, 429, 500, 502, 503, 504}
_PASSING_CODES = {
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "InternalError",
    "ServiceUnavailable",
    "OperationAborted",
    "ConditionalRequestConflict",
}
#: Bytes that changed on their way: they are sent again.
_DAMAGED = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"}
_WRONG_KEY = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "TokenRefreshRequired",
}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_FULL = {
    "QuotaExceeded",
    "XMinioStorageFull",
    "StorageFull",
    "XMinioAdminBucketQuotaExceeded",
    "InsufficientCapacity",
}
_CREDENTIALS_FIX = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile with profile=NAME or AWS_PROFILE "
    "(~/.aws/config; it may have a credential_process); a running node keeps those it was started with: "
    "`aenv node stop`"
)


def status_of(error: ClientError) -> int:
    """The HTTP status."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    """The store's own code; of a HEAD, which has no body, the status as text."""
    return str(error.response.get("Error", {}).get("Code", ""))


def is_absent(error: ClientError) -> bool:
    """Whether there is no such key (a HEAD cannot tell that from a missing bucket)."""
    return code_of(error) in ("NoSuchKey", "404", "NotFound") and status_of(error) == 404


def is_precondition(error: ClientError) -> bool:
    """Whether the condition of a conditional request did not hold."""
    return status_of(error) == 412 or code_of(error) == "PreconditionFailed"


def is_unknown_to_store(error: ClientError) -> bool:
    """Whether the store does not have what was asked for."""
    return status_of(error) == 501 or code_of(error) == "NotImplemented"


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed in a moment."""
    if isinstance(error, ClientError):
        return status_of(error) in _PASSING_STATUS or code_of(error) in _PASSING_CODES | _DAMAGED
    return isinstance(error, HTTPClientError) and not isinstance(error, SSLError)


def is_unreached(error: Exception) -> bool:
    """Whether nobody was there, so that few tries are enough."""
    return isinstance(error, EndpointConnectionError | ConnectTimeoutError)


def explained(error: Exception, doing: str, place: S3Place) -> AenvError:
    """The error for callers: what was done, where, what the store said, what to do."""
    what = f"{doing} in {place}"
    if isinstance(error, ClientError):
        return _refused(error, what, place)
    if isinstance(
        error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError | ProfileNotFound
    ):
        return Unauthenticated(f"{what}: no usable credentials ({_said(error)})", fix=_CREDENTIALS_FIX)
    if isinstance(error, NoRegionError):
        return no_region(place)
    if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
        where = place.server or "the endpoint of Amazon S3"
        return StoreUnavailable(
            f"{what}: {where} cannot be reached for bucket {place.bucket}",
            fix="look whether the server runs and that host, port and scheme of endpoint=… are right",
        )
    if isinstance(error, SSLError):
        fix = "name its authority in AWS_CA_BUNDLE, or write endpoint=http://… if it has no TLS"
        return StoreUnavailable(f"{what}: TLS failed ({_said(error)})", fix=fix)
    if isinstance(error, BotoCoreError):
        return StoreUnavailable(f"{what}: {_said(error)}", fix="try again; the store may be overloaded")
    return StoreUnavailable(f"{what}: {type(error).__name__}", fix="try again")


def changed_on_its_way(what: str) -> CorruptData:
    """Sent several times and never stored as it was."""
    return CorruptData(
        f"{what}: the store has other bytes than were sent, again and again",
        fix="look at proxies between here and the store, and at the store's disks",
    )


def no_region(place: S3Place) -> InvalidInput:
    """There must be a region, also where the store has only one."""
    return InvalidInput(
        f"no region is named for {place}",
        fix="add region=… to the URL or set AWS_REGION; stores that have no regions take us-east-1",
    )


def _refused(error: ClientError, what: str, place: S3Place) -> AenvError:
    code, status = code_of(error), status_of(error)
    said = f"{what}: the store answered {status}" + (f" {printable(code)[:80]}" if code != str(status) else "")
    if code == "RequestTimeTooSkewed":
        return Unauthenticated(f"{said}: this host's clock is wrong", fix="set the clock (NTP), then repeat")
    if code in _WRONG_KEY:
        return Unauthenticated(f"{said}: it does not know this key or its secret", fix=_CREDENTIALS_FIX)
    if code in _WRONG_REGION or status == 301:
        right = _right_region(error)
        known = f", its region is {right}" if right else ""
        fix = f"write region={right or '…'} as the bucket's owner says, and the endpoint of that region if any"
        return InvalidInput(f"{said}: bucket {place.bucket} is not in the region asked{known}", fix=fix)
    if code == "NoSuchBucket":
        return NotFound(
            f"{said}: there is no bucket {place.bucket}",
            fix="create it, or correct the URL (for own servers mostly addressing=path)",
        )
    if code in _FULL or status == 507:
        return NoSpace(f"{said}: it is full", fix="free space there, or have its quota raised")
    if status in (401, 403):
        return Unauthenticated(
            f"{said}: these credentials may not do that",
            fix=f"allow GetObject, PutObject, DeleteObject, AbortMultipartUpload, ListBucket on {place.bucket}, "
            "or use other credentials",
        )
    if code == "EntityTooLarge":
        return TooLarge(f"{said}: the object is too large for it", fix="use a store with larger objects")
    if status == 404 or code == "NoSuchKey":
        return NotFound(said)
    if is_unknown_to_store(error):
        return Unsupported(f"{said}: it does not have that", fix="use another store; see docs/repositories.md")
    if code in _DAMAGED:
        return changed_on_its_way(said)
    if is_passing(error):
        return StoreUnavailable(said, fix="try again; the store may be overloaded")
    return StoreUnavailable(said, fix="look at the server's log; is this URL that of an S3 API?")


def _right_region(error: ClientError) -> str:
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region", "")
    return printable(str(region))[:40]


def _said(error: Exception) -> str:
    """Its text, which for botocore's errors has URLs without their queries at most; bounded."""
    return printable(str(error).partition("?")[0])[:200]
