"""Requests to one bucket: the client, retries with back-off, errors in our words, checksums of what is sent."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import tenacity
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader

from aenv_run.stopping import STOP
from aenv_run.store.s3_answers import verify_answers
from aenv_run.store.s3_errors import code_of, explained, is_passing, is_unreached, no_region, status_of
from aenv_run.store.s3_place import Addressing, S3Place

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

T = TypeVar("T")

#: So often bytes that changed on their way are sent again; some servers do not look at Content-MD5.
SENDINGS = 3
#: What is stored with an object, so that a writer whose answer was lost knows its own write again.
_NONCE, _AFTER = "aenv-nonce", "aenv-after"
#: So many writes over his own a writer may come late. A value of metadata may have 256 bytes in Swift.
REMEMBERED = 12


@dataclass(frozen=True)
class Patience:
    """How often a request is tried, less often while nobody is there; no try begins after ``longest_s``."""

    tries: int = 7
    unreached_tries: int = 3
    longest_s: float = 60.0
    first_wait_s: float = 0.2
    connect_s: float = 4.0
    read_s: float = 30.0


@dataclass(frozen=True)
class Sent:
    """Bytes for one request, with their MD5: the server refuses others, and its ETag is compared."""

    data: bytes
    md5: bytes

    @classmethod
    def of(cls, data: bytes) -> Sent:
        """Digest them. MD5 guards against accidents only; whoever reads compares SHA-256."""
        return cls(data, hashlib.md5(data, usedforsecurity=False).digest())

    @property
    def content_md5(self) -> str:
        """As the header has it."""
        return base64.b64encode(self.md5).decode()

    def is_stored(self, etag: str, encrypted: str) -> bool:
        """False if the store says that it has other bytes. Of encrypted ones it cannot tell."""
        told = etag.strip('"').lower()
        return len(told) != 32 or told == self.md5.hex() or encrypted.startswith("aws:kms")


class S3Requests:
    """Thread-safe. The client is made at the first request, since that reads files and takes a while."""

    def __init__(self, place: S3Place, patience: Patience) -> None:
        self.place = place
        self.patience = patience
        self._lock = threading.Lock()
        self._client: S3Client | None = None

    def name(self, key: str) -> str:
        """The key in the bucket."""
        return f"{self.place.prefix}/{key}" if self.place.prefix else key

    def ask(
        self, doing: str, call: Callable[[S3Client], T], *, expect: Callable[[ClientError], bool] | None = None
    ) -> T:
        """``call``, again while the store has a passing fault. An ``expect``ed refusal is raised as it is."""
        with STOP.doing(f"{doing} in {self.place}"):
            return self._ask(doing, call, expect)

    def _ask(self, doing: str, call: Callable[[S3Client], T], expect: Callable[[ClientError], bool] | None) -> T:
        try:
            try:
                return self._tried(call)
            except ClientError as error:
                if (expect is not None and expect(error)) or not _lacks_reason(error):
                    raise
                self._connected().list_objects_v2(Bucket=self.place.bucket, Prefix=self.name("-"), MaxKeys=1)
                return self._tried(call)  # the client learns a bucket's region from such an answer
        except ClientError as error:
            if expect is not None and expect(error):
                raise
            raise explained(error, doing, self.place) from None
        except (BotoCoreError, RecursionError, KeyError, ValueError) as error:  # its parsers raise the latter
            raise explained(error, doing, self.place) from None

    def _tried(self, call: Callable[[S3Client], T]) -> T:
        for attempt in self._attempts():
            with attempt:
                return call(self._connected())
        raise AssertionError("unreachable")

    def pause(self, number: int) -> None:
        """Wait before try ``number`` (from 1) of something that is tried again."""
        STOP.asked.wait(min(5.0, self.patience.first_wait_s * 2 ** (number - 1)))

    def _attempts(self) -> tenacity.Retrying:
        patience = self.patience

        def over(state: tenacity.RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome else None
            if STOP.asked.is_set():
                return True
            unreached = isinstance(error, Exception) and is_unreached(error)
            tries = patience.unreached_tries if unreached else patience.tries
            return state.attempt_number >= tries or (state.seconds_since_start or 0.0) >= patience.longest_s

        jittered = tenacity.wait_random_exponential(multiplier=patience.first_wait_s, max=5.0)

        def wait(state: tenacity.RetryCallState) -> float:
            return max(jittered(state), _retry_after_s(state.outcome.exception() if state.outcome else None))

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, Exception) and is_passing(e)),
            stop=over,
            wait=wait,
            sleep=tenacity.sleep_using_event(STOP.asked),
            reraise=True,
        )

    def _connected(self) -> S3Client:
        with self._lock:
            if self._client is None:
                self._client = _client(self.place, self.patience)
            return self._client


def _lacks_reason(error: ClientError) -> bool:
    """A HEAD is refused without a reason; the same question by another request has one."""
    return code_of(error) == str(status_of(error)) and status_of(error) in (301, 400, 401, 403)


@dataclass(frozen=True)
class Mark:
    """Whose write an object is, and which writes it stands on, the newest first."""

    nonce: str
    after: tuple[str, ...] = ()
    creates: bool = False

    @classmethod
    def new(cls, below: Mark | None = None) -> Mark:
        """Of a write over ``below``, or of one that creates."""
        after = (below.nonce, *below.after)[:REMEMBERED] if below and below.nonce else ()
        return cls(secrets.token_hex(8), after, creates=below is None)

    @classmethod
    def of(cls, metadata: Mapping[str, str] | None) -> Mark:
        """As it was stored; the nonce is "" if it was not."""
        lowered = {name.lower(): value for name, value in (metadata or {}).items()}
        return cls(lowered.get(_NONCE, ""), tuple(lowered.get(_AFTER, "").split()))

    def stands_on(self, other: Mark) -> bool:
        """Whether ``other`` is what this write found."""
        return other.nonce == (self.after[0] if self.after else "")

    def excludes(self, lost: Mark) -> bool:
        """Whether the write ``lost``, which is not among those that this one remembers, cannot have been made."""
        if lost.creates:
            return bool(self.nonce) and len(self.after) < REMEMBERED
        return bool(lost.after) and lost.after[0] in self.after

    @property
    def metadata(self) -> dict[str, str]:
        """To store it."""
        return {_NONCE: self.nonce} | ({_AFTER: " ".join(self.after)} if self.after else {})


def _client(place: S3Place, patience: Patience) -> S3Client:
    import boto3.session
    import botocore.session

    try:
        core = botocore.session.Session(profile=place.profile)
        core.register_component("data_loader", _models())
        session = boto3.session.Session(botocore_session=core)
    except BotoCoreError as error:
        raise explained(error, "opening the repository", place) from None
    region = place.region or os.environ.get("AWS_REGION") or session.region_name
    if not region:
        raise no_region(place)
    client: S3Client = session.client(
        "s3",
        region_name=region,
        endpoint_url=place.endpoint,
        config=Config(
            connect_timeout=patience.connect_s,
            read_timeout=patience.read_s,
            retries={"total_max_attempts": 1},  # ours know which writes are safe to repeat
            max_pool_connections=32,
            tcp_keepalive=True,
            user_agent_extra="aenv",
            s3={"addressing_style": _addressing(place)},
            # Newer checksums are sent in a form that many stores do not know. Content-MD5 all know.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    verify_answers(client, place)
    return client


@functools.cache
def _models() -> Loader:
    """The API's description, 200 ms to read: shared by all clients. Nothing of a user is in it."""
    return Loader()


def _addressing(place: S3Place) -> Addressing:
    """Own servers have rarely a host name for each bucket."""
    if place.addressing != "auto":
        return place.addressing
    return "path" if place.server and ".amazonaws.com" not in place.server else "auto"


def _retry_after_s(error: BaseException | None) -> float:
    """What the store asks for, bounded."""
    if not isinstance(error, ClientError):
        return 0.0
    text = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
    return min(float(text), 20.0) if text.isascii() and text.isdigit() else 0.0
