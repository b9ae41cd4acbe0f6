"""An object in an object store that refuses the writes of a holder whose time is over.

A store compares ETags, and in S3 an ETag is made from the content alone: a mark that was raised in
the metadata would leave it as it is, and the write that came too late would pass. So the fence
stands in the content too, in a line before the data, and no two fences share an ETag.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument, LockError, LockUsageError, shown
from .rejecting import Fenced, reject, require_fence

#: How often a write is tried that others come before. Each time one of them got through.
TRIES = 12

#: The name of the fence in an object's metadata.
METADATA = "distlock-fence"
_HEAD = re.compile(rb"distlock-fence ([0-9]{15}) (data|none)\n")
_HEAD_BYTES = 36

#: Seconds of the first pause at most; each is twice the one before.
_PAUSE = 0.01
_MAX_PAUSE = 0.5


class _Found(NamedTuple):
    """What is in the store: `etag` is None where there is no object."""

    etag: str | None
    fence: int
    value: bytes | None = None


class FencedObject:
    r"""An object and the highest fence that it was read or written with.

    Whoever comes with a lower fence is refused; with an equal one, not. Each write is conditional
    (`If-Match`, `If-None-Match`), so the store has to know conditions: one that passes over them
    overwrites.

    The object begins with a line of 36 bytes that carries the fence:
    `distlock-fence 000000000000042 data\n`. Others who read it leave that line out. An object
    without it was never fenced: any fence passes, and the first one writes the line. Of an object
    that is written again nothing else is kept: no content type, no metadata, no tags.

    Args:
        client: What talks to the store: a client of boto3 for S3, or what has its `get_object`,
            `head_object` and `put_object`, and raises errors with its `response`.
        bucket: The bucket.
        key: The name of the object.
    """

    def __init__(self, client: Any, bucket: str, key: str):
        self.client = client
        self.bucket = bucket
        self.key = key

    def get(self, by: Fenced) -> bytes | None:
        """Return the data; None: there are none. From then on, lower fences are refused.

        The first one to read with a new fence writes the object again, with its fence; also where
        there was none, and that object has no data.

        Args:
            by: The lease, or the fence, under which the data are read to be changed.

        Raises:
            FenceRejected: Somebody with a higher fence was here before.
            LockUsageError: `by` has no fence, or the object's own fence was tampered with.
            LockError: Others wrote the object again and again (`code` "aborted").
        """
        fence = require_fence(by)
        for _ in self._tries():
            found = self._checked(by, self._fetched())
            if found.fence == fence or self._swapped(found.etag, fence, found.value):
                return found.value
        raise self._overtaken()

    def put(self, data: bytes, by: Fenced) -> None:
        """Write the data.

        Args:
            data: All of it, below the 5 GB of one upload.
            by: The lease, or the fence, to write with.

        Raises:
            FenceRejected: Somebody with a higher fence was here before. Nothing was written.
            InvalidArgument: The data are no bytes.
            LockUsageError: `by` has no fence, or the object's own fence was tampered with.
            LockError: Others wrote the object again and again (`code` "aborted").
        """
        if not isinstance(data, bytes):
            raise InvalidArgument(f"The data of an object are bytes, not {shown(data)}.")
        self._write(data, by)

    def delete(self, by: Fenced) -> None:
        """Remove the data, and keep the fence in an object without data.

        Raises:
            FenceRejected: Somebody with a higher fence was here before. Nothing was removed.
            LockUsageError: `by` has no fence, or the object's own fence was tampered with.
            LockError: Others wrote the object again and again (`code` "aborted").
        """
        self._write(None, by)

    def read(self) -> bytes | None:
        """Return the data for people to see: no fence is compared, and none is raised."""
        return self._fetched().value

    def _write(self, value: bytes | None, by: Fenced) -> None:
        fence = require_fence(by)
        for _ in self._tries():
            found = self._checked(by, self._looked())
            if self._swapped(found.etag, fence, value):
                return
        raise self._overtaken()

    def _checked(self, by: Fenced, found: _Found) -> _Found:
        if found.fence > by.fence:
            reject(by, f"The object {self.key!r} in {self.bucket!r}", found.fence)
        return found

    # The store

    def _looked(self) -> _Found:
        try:
            answer = self.client.head_object(Bucket=self.bucket, Key=self.key)
        except Exception as error:
            if _status(error) == 404:
                return _Found(None, 0)
            raise
        return _Found(answer["ETag"], self._fence_of(answer))

    def _fetched(self) -> _Found:
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=self.key)
        except Exception as error:
            if _code(error) == "NoSuchKey":
                return _Found(None, 0)
            raise
        fence, content = self._fence_of(answer), answer["Body"].read()
        if fence == 0:
            return _Found(answer["ETag"], 0, content)
        head = _HEAD.match(content)
        if head is None or int(head[1]) != fence:
            raise self._tampered()
        value = content[_HEAD_BYTES:] if head[2] == b"data" else None
        return _Found(answer["ETag"], fence, value)

    def _fence_of(self, answer: Any) -> int:
        for name, value in answer["Metadata"].items():
            if name.lower() == METADATA:
                if not re.fullmatch(r"[0-9]{15}", value):
                    raise self._tampered()
                return int(value)
        return 0

    def _swapped(self, etag: str | None, fence: int, value: bytes | None) -> bool:
        """Write, if the object is still the one with this ETag; None: if there is none."""
        head = f"distlock-fence {fence:015d} {'none' if value is None else 'data'}\n".encode()
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            self.client.put_object(
                Bucket=self.bucket,
                Key=self.key,
                Body=head + (value or b""),
                Metadata={METADATA: f"{fence:015d}"},
                **condition,
            )
        except Exception as error:
            # 412: it is another one now. 409: somebody writes it at this moment. NoSuchKey: it was
            # removed meanwhile.
            if _status(error) in (409, 412) or _code(error) == "NoSuchKey":
                return False
            raise
        return True

    def _tries(self) -> Iterator[int]:
        for number in range(TRIES):
            if number:
                time.sleep(random.uniform(0, min(_MAX_PAUSE, _PAUSE * 2**number)))  # noqa: S311
            yield number

    def _overtaken(self) -> LockError:
        return LockError(
            f"The object {self.key!r} in {self.bucket!r} was written by others {TRIES} times in a"
            f" row, each time between our look at it and our write. Nothing was written.",
            code="aborted",
        )

    def _tampered(self) -> LockUsageError:
        return LockUsageError(
            f"The object {self.key!r} in {self.bucket!r} has one fence in its metadata, and"
            f" another, or none, in its first line. Who writes it has to use FencedObject."
        )


def _status(error: Exception) -> int | None:
    status: int | None = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _code(error: Exception) -> str | None:
    code: str | None = _response(error).get("Error", {}).get("Code")
    return code


def _response(error: Exception) -> Any:
    return getattr(error, "response", None) or {}
