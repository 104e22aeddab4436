"""The files of a store or a run in object storage: S3, compatible services, or Google Cloud
Storage.

Credentials, region and endpoint come from the usual environment variables of the storage
(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, ...). Objects are written
atomically, so a killed writer leaves no partial file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from clients.store.manifest import MANIFEST, Manifest, parse_manifest
from clients.store.shards import ShardFacts, require_arrow
from protos.errors import Corrupt, DistillError, Forbidden, NotFound, Unavailable, WrongState
from protos.rpc.failpoints import failpoint
from protos.rpc.transport import backoff

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_CHUNK_BYTES = 8 << 20
_CONNECT_SECONDS, _REQUEST_SECONDS = 10, 60
_GOOGLE_SECONDS = 5  # Google's library repeats a request for this time (default: 15 minutes)
_MAX_READS = 3  # attempts to read a damaged manifest
_CLAIM_NAME = "writer"  # the object that names the process that may write
# Parts of pyarrow's error messages, which have no codes.
_NO_BUCKET_MESSAGES = ("NO_SUCH_BUCKET", "NoSuchBucket", "bucket does not exist")
_DENIED_MESSAGES = (
    *("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "INVALID_CLIENT_TOKEN_ID", "EXPIRED_TOKEN"),
    *("SIGNATURE_DOES_NOT_MATCH", "UNRECOGNIZED_CLIENT", "HTTP status 401", "HTTP status 403"),
    *("PERMISSION_DENIED", "UNAUTHENTICATED", "ExpiredToken", "InvalidToken"),
)
# Google's library reports this without credentials, and while its token server does not answer.
_NO_TOKEN_MESSAGE = "Could not create a OAuth2 access token"
_GOOGLE_STATUS = "google::cloud::Status"

# Variables with the location of the storage, or with the credentials.
_VARIABLES = {"s3": "AWS_ENDPOINT_URL and AWS_REGION", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}

_T = TypeVar("_T")


class ObjectFolder:
    """The files below one URL, such as s3://bucket/rows.

    If the storage does not respond, a call waits up to `patience_seconds`, or until `stopped`
    returns true, and then raises Unavailable. Every call raises NotFound if the bucket does not
    exist, and Forbidden if the storage refuses the credentials. Raises InvalidInput if pyarrow is
    not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        require_arrow()
        self.name = url
        self._patience = patience_seconds
        self._stopped = stopped
        self._scheme, _, self._base = url.partition("://")
        self._bucket = self._base.partition("/")[0]
        self._has_answered = False
        self._files: Any = self._retry(lambda: _file_system(self._scheme, self._bucket))
        self._has_answered = False  # creating the file system makes no request
        self._claim: bytes | None = None

    def require_bucket(self) -> None:
        """Raise NotFound if the bucket does not exist."""
        import pyarrow.fs

        info = self._retry(lambda: self._files.get_file_info(self._bucket))
        if info.type is pyarrow.fs.FileType.NotFound:
            raise self._no_bucket()

    def manifest(self) -> Manifest | None:
        """Return the manifest; None if there is no store. Raises the errors of `read_manifest`.

        A damaged manifest is read again. The reason: a read requests first the size and then the
        bytes, so the content is cut if a writer replaces the manifest between the two requests.
        """
        for _ in range(_MAX_READS - 1):
            with suppress(Corrupt):
                return self._read_manifest()
        return self._read_manifest()

    def _read_manifest(self) -> Manifest | None:
        content = self.read(MANIFEST)
        return None if content is None else parse_manifest(content, self.name)

    def claim(self) -> None:
        """Make this process the only writer of the store.

        Object storage has no locks. The last process that has claimed a store is its writer. Each
        other writer raises WrongState before it writes its next file. A writer on a lost machine
        therefore cannot block a new writer.
        """
        claim = secrets.token_hex(16).encode()
        self._retry(lambda: self._upload(_CLAIM_NAME, claim))
        self._claim = claim

    def damages(self, shards: Sequence[ShardFacts]) -> Iterator[str | None]:
        """Yield one element per shard: a text about its problem, or None if it is whole.

        Only the size is compared, because `write` verified the content.
        """
        sizes = self._sizes() if shards else {}
        for shard in shards:
            if shard.name not in sizes:
                yield "the object is missing"
            else:
                has_right_size = sizes[shard.name] == shard.bytes
                yield (
                    None
                    if has_right_size
                    else f"the object has {sizes[shard.name]} bytes, not {shard.bytes}"
                )

    def write(self, name: str, data: bytes) -> None:
        """Write a file and read it back. Call `claim` first.

        Raises WrongState if another process has started to write to the store, Corrupt if the
        storage returns other bytes.
        """
        self._require_claim()
        self._retry(lambda: self._upload(name, data))
        failpoint("object-written")
        if self.read(name) != data:
            raise Corrupt(
                f"{self.name}/{name} differs from the written bytes",
                hint="resume the job to try again",
            )

    def remove_unnamed(self, shards: Sequence[ShardFacts]) -> None:
        """Delete the shards that are not in `shards`, which an interrupted writer left.

        Raises the errors of `write`.
        """
        self._require_claim()
        listed_names = {shard.name for shard in shards}
        for name in self._sizes():
            if name.endswith(".arrow") and name not in listed_names:
                self._delete(name)

    def send(self, name: str, file: BinaryIO) -> None:
        """Copy an open local file to the storage, and verify the stored size.

        Call `claim` first. The file may grow during the copy. Raises WrongState if another process
        has started to write to the store, Corrupt if the stored size differs, and OSError if the
        file cannot be read.
        """

        def upload_file() -> int:
            file.seek(0)
            with self._files.open_output_stream(self._path(name)) as out:
                while chunk := file.read(_CHUNK_BYTES):
                    out.write(chunk)
            return file.tell()

        self._require_claim()
        sent_bytes = self._retry(upload_file)
        failpoint("object-sent")
        if [size for size, _ in self.facts(name).values()] != [sent_bytes]:
            raise Corrupt(
                f"{self.name}/{name} does not have the {sent_bytes} bytes of the file",
                hint="resume the job to try again",
            )

    def tree(self) -> dict[str, int]:
        """Return the size in bytes of each file, also in subfolders, by relative path."""
        import pyarrow.fs

        selector = pyarrow.fs.FileSelector(self._base, allow_not_found=True, recursive=True)
        infos = self._retry(lambda: self._files.get_file_info(selector))
        start = f"{self._base}/"
        return {info.path.removeprefix(start): info.size for info in infos if info.is_file}

    def delete(self, name: str) -> None:
        """Delete a file. Raises the errors of `write`."""
        self._require_claim()
        self._delete(name)

    def delete_folder(self, name: str) -> None:
        """Delete a folder with its files, if it exists. Raises the errors of `write`."""
        self._require_claim()
        if any(path.startswith(f"{name}/") for path in self.tree()):
            # Google's storage has no object for the folder itself.
            with suppress(FileNotFoundError):
                self._retry(lambda: self._files.delete_dir(self._path(name)))

    def facts(self, name: str = "") -> dict[str, tuple[int, int]]:
        """Return (size in bytes, modification time in ns) of files in the folder, by file name.

        `name`: only this file; "" means all files directly in the folder.
        """
        import pyarrow.fs

        selector = [self._path(name)]
        if not name:
            selector = pyarrow.fs.FileSelector(self._base, allow_not_found=True)
        infos = self._retry(lambda: self._files.get_file_info(selector))
        return {info.base_name: (info.size, info.mtime_ns) for info in infos if info.is_file}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""

        def read_object() -> bytes | None:
            try:
                with self._files.open_input_stream(self._path(name)) as stream:
                    content: bytes = stream.read()
                    return content
            except FileNotFoundError:
                return None

        return self._retry(read_object)

    def digest(self, name: str, copy: Path | None = None) -> str | None:
        """Return the sha256 of a file, or None if it does not exist.

        `copy`: local path to which the bytes are also written; None: no copy.
        """

        def hash_object() -> str | None:
            hasher = hashlib.sha256()
            try:
                with (
                    self._files.open_input_stream(self._path(name)) as stream,
                    open(copy or os.devnull, "wb") as out,
                ):
                    while chunk := stream.read(_CHUNK_BYTES):
                        hasher.update(chunk)
                        out.write(chunk)
            except FileNotFoundError:
                return None
            return hasher.hexdigest()

        return self._retry(hash_object)

    def close(self) -> None:
        """Do nothing: object storage has no lock to release."""

    def _require_claim(self) -> None:
        """Raise WrongState if another process has claimed the store after this process."""
        assert self._claim is not None, "call claim first"
        if self.read(_CLAIM_NAME) != self._claim:
            raise WrongState(
                f"another process is writing to {self.name}",
                hint="wait until that process ends, or use another prefix",
            )

    def _sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file in the folder, by file name."""
        return {name: size for name, (size, _) in self.facts().items()}

    def _delete(self, name: str) -> None:
        self._retry(lambda: self._files.delete_file(self._path(name)))

    def _upload(self, name: str, data: bytes) -> None:
        with self._files.open_output_stream(self._path(name)) as stream:
            stream.write(data)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    def _retry(self, work: Callable[[], _T]) -> _T:
        """Call `work` until the storage responds, with growing pauses, and return its result.

        Raises the errors that the class describes.
        """
        import pyarrow

        deadline = time.monotonic() + self._patience
        for failures in count(1):
            pause = backoff(failures, _FIRST_PAUSE, _LONGEST_PAUSE)
            try:
                answer = work()
                self._has_answered = True
                return answer
            except (OSError, pyarrow.ArrowException) as error:
                reason = " ".join(str(error).split())
                is_disk_error = (
                    getattr(error, "errno", None) is not None and _GOOGLE_STATUS not in reason
                )
                if isinstance(error, DistillError) or is_disk_error:
                    raise
                if any(message in reason for message in _NO_BUCKET_MESSAGES):
                    raise self._no_bucket() from error
                if isinstance(error, FileNotFoundError):
                    if "CreateResumableUpload" in reason:  # an upload needs the bucket alone
                        raise self._no_bucket() from error
                    raise
                is_denied = any(message in reason for message in _DENIED_MESSAGES)
                if _NO_TOKEN_MESSAGE in reason:
                    cause = reason.partition("The underlying error message was: ")[2]
                    reason = f"{_NO_TOKEN_MESSAGE}: {cause.partition(' error_info=')[0]}"
                reason = reason[:300]
                if is_denied or (_NO_TOKEN_MESSAGE in reason and not self._has_answered):
                    raise Forbidden(
                        f"{self.name}: the storage refuses the credentials: {reason}",
                        hint="set credentials in the environment that may list, read, write and"
                        " delete below this URL",
                    ) from error
                if time.monotonic() + pause > deadline or self._stopped():
                    raise Unavailable(
                        f"{self.name} does not answer: {reason}",
                        hint="complete files are kept; resume the job when the storage answers,"
                        " or correct"
                        f" {_VARIABLES[self._scheme]} in the environment",
                    ) from error
            log.warning("%s: %s; next try in %.1f s", self.name, reason, pause)
            resume_at = time.monotonic() + pause
            while time.monotonic() < resume_at and not self._stopped():
                time.sleep(_FIRST_PAUSE)
        raise AssertionError("unreachable: the loop has no end")

    def _no_bucket(self) -> NotFound:
        return NotFound(
            f"{self.name}: there is no such bucket", hint="create the bucket, or use another one"
        )


def _file_system(scheme: str, bucket: str) -> Any:
    from pyarrow import fs

    if scheme == "gs":
        # An emulator, named by the variable of Google's own libraries, has no credentials.
        return fs.GcsFileSystem(
            anonymous="CLOUD_STORAGE_EMULATOR_ENDPOINT" in os.environ,
            retry_time_limit=timedelta(seconds=_GOOGLE_SECONDS),
        )
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    region = None
    if not (endpoint or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        # A bucket of another region than us-east-1 would not be found.
        with suppress(OSError):
            region = fs.resolve_s3_region(bucket)
    scheme, _, host = endpoint.rpartition("://")
    return fs.S3FileSystem(
        region=region,
        endpoint_override=host.rstrip("/") or None,
        scheme=scheme or "https",
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
    )
