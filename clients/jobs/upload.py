"""Uploads the files that a job names. Only files that the server does not have yet are sent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc

from clients.config.file import is_absolute, is_file_name, named_files, replaced, similar_path
from clients.config.kinds import AnyJob
from clients.data.formats import FILE_SUFFIXES, exists_here, files_of, is_pattern
from clients.data.models.files import ADAPTER_CONFIG, MODEL_KEYS, list_model_files
from clients.data.records import DataSet, images_of
from clients.jobs.connection import ServerConnection
from clients.store.manifest import read_manifest
from protos import distill_pb2 as pb
from protos.distill_pb2_grpc import DistillStub
from protos.errors import Corrupt, DistillError, InvalidInput, WrongState
from protos.rpc.statuses import fault_of
from protos.rpc.transport import MAX_UPLOAD_FILES, MAX_UPLOAD_PATH_BYTES

_Job = TypeVar("_Job", bound=AnyJob)

# An interrupted part is sent again from its start, so parts are short.
_PART_BYTES = 256 << 10
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True)
class UploadProgress:
    """The progress of an upload of the files that a job names under `key`.

    - `sent_bytes`: number of bytes that the server has
    - `size`: number of bytes of all files
    - `begins`: True only in the first report, before this upload has sent a part
    """

    key: str
    sent_bytes: int
    size: int
    begins: bool = False


Report: TypeAlias = Callable[[UploadProgress], None]


@dataclass(frozen=True)
class LocalFiles:
    """The files on this machine that a job names under `key`: a file, a directory or a pattern.

    - `place`: the file or directory; for a pattern, the directory that contains all its files
    - `files`: the local path of each file, by its relative path in the upload. The relative path
      begins with the last part of `place`.
    - `pattern`: the pattern relative to `place`; "" if the job names no pattern
    """

    key: str
    place: Path
    files: Mapping[str, Path]
    pattern: str = ""


def local_files(job: AnyJob) -> list[LocalFiles]:
    """Return the files that a job names and that exist on this machine.

    Hub ids and absolute paths that do not exist here are left out. Raises InvalidInput, naming the
    key, if a file cannot be sent. A relative path that does not exist is refused, too, because a
    server has another working directory.
    """
    uploads = []
    for key, name in named_files(job):
        if not exists_here(name):
            _refuse_missing(key, name)
            continue
        if key == "reward.file":
            raise InvalidInput(
                "cannot be uploaded: a server does not run the code of a job",
                field=key,
                hint="use distill run, which runs the job on this machine",
            )
        _refuse_images(job, key, name)
        # Do not resolve links: the name may be a link, as in a cache of the hub.
        path = os.path.abspath(name)
        uploads.append(
            _list_matches(key, path) if is_pattern(name) else _list_files(key, Path(path))
        )
    return uploads


def paths_of_server(job: AnyJob) -> list[tuple[str, str, str]]:
    """Return the paths in a job that do not exist on this machine, and so can only be on the
    server.

    Each element is (key, path, similar local path or ""). A name that may be a hub id is left out.
    """
    return [
        (key, name, similar_path(Path(name)))
        for key, name in named_files(job)
        if is_file_name(name) and not exists_here(name)
    ]


class Uploader:
    """Uploads files to a server. Files with equal contents are sent once."""

    def __init__(self, connection: ServerConnection, stub: DistillStub, report: Report) -> None:
        self._connection = connection
        self._stub = stub
        self._report = report
        self._is_connected = False
        self._digests: dict[Path, str] = {}
        self._paths: dict[tuple[Path, ...], str] = {}

    def upload(self, job: _Job) -> _Job:
        """Upload the local files of a job.

        Return the job with the paths of these files on the server.
        """
        for local in local_files(job):
            sources = tuple(local.files.values())
            if sources not in self._paths:
                self._paths[sources] = self._upload_files(local)
            job = replaced(job, local.key, str(Path(self._paths[sources], local.pattern)))
        return job

    def _upload_files(self, local: LocalFiles) -> str:
        """Upload the files of one key, and return their path on the server.

        After a broken connection, the upload continues with the first missing byte.
        """
        upload = _Upload(local, self._digests)
        request = pb.BeginUploadRequest(files=upload.files)

        def begin() -> str:
            reply = self._connection.call(self._stub.BeginUpload, request)
            upload.begin(reply.missing)
            return reply.path

        def work() -> str:
            path = begin()
            while not path:
                self._send_parts(upload)
                path = begin()
            return path

        try:
            # A server that cannot be reached at all is an error at once.
            path = self._connection.resuming(begin, lambda: 0) if self._is_connected else begin()
            self._is_connected = True
            self._report(replace(upload.progress, begins=True))
            return path or self._connection.resuming(work, lambda: upload.server_bytes)
        except (InvalidInput, WrongState, Corrupt) as error:
            error.field = error.field or local.key
            raise

    def _send_parts(self, upload: _Upload) -> None:
        def parts() -> Iterator[pb.FilePart]:
            for part in upload.parts():
                yield part
                self._report(upload.progress)

        call = self._stub.SendFiles.future(parts())
        try:
            with self._connection.stream(call):
                call.result()
        except grpc.FutureCancelledError:
            self._connection.require_usable()
            raise
        except grpc.RpcError as error:
            raise upload.fault or fault_of(error, self._connection.name) from error
        if upload.fault is not None:
            raise upload.fault


@dataclass
class _Upload:
    """One upload: its files, their digests and its progress.

    - `server_bytes`: number of bytes that the server had at the last `begin`
    - `sent_bytes`: `server_bytes`, and the bytes that were sent since then
    - `fault`: the error of a local file that could not be read
    - `missing`: the files of which the server needs bytes
    - `sources`: local path and size in bytes of each file, by its sha256
    """

    local: LocalFiles
    digests: dict[Path, str]
    files: Sequence[pb.UploadFile] = ()
    server_bytes: int = 0
    sent_bytes: int = 0
    fault: DistillError | None = None
    missing: Sequence[pb.MissingFile] = ()
    sources: dict[str, tuple[Path, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compute the digests of the files. Raises InvalidInput if a file cannot be read."""
        upload_files = []
        for path, source in self.local.files.items():
            try:
                with source.open("rb") as file:
                    if source not in self.digests:
                        self.digests[source] = hashlib.file_digest(file, "sha256").hexdigest()
                    size = file.seek(0, os.SEEK_END)
            except OSError as error:
                raise self._unreadable_file(source, error.strerror or str(error)) from error
            upload_files.append(pb.UploadFile(path=path, size=size, sha256=self.digests[source]))
            self.sources[self.digests[source]] = (source, size)
        self.files = upload_files

    @property
    def progress(self) -> UploadProgress:
        """The progress of the upload. Files with equal contents are counted once."""
        size = sum(size for _, size in self.sources.values())
        return UploadProgress(self.local.key, self.sent_bytes, size)

    def begin(self, missing: Sequence[pb.MissingFile]) -> None:
        """Store the files of which the server needs bytes, each with its first missing byte."""
        self.missing = missing
        missing_bytes = sum(
            self.sources[missing_file.sha256][1] - missing_file.offset for missing_file in missing
        )
        self.server_bytes = self.sent_bytes = self.progress.size - missing_bytes

    def parts(self) -> Iterator[pb.FilePart]:
        """Yield the bytes that the server needs, in parts.

        If a file cannot be read, store the error in `fault` and end.
        """
        for missing_file in self.missing:
            source, size = self.sources[missing_file.sha256]
            offset = missing_file.offset
            try:
                with source.open("rb") as file:
                    file.seek(offset)
                    while True:
                        data = file.read(min(_PART_BYTES, size - offset))
                        if not data and offset < size:
                            raise OSError("the file has become shorter")
                        self.sent_bytes += len(data)
                        yield pb.FilePart(sha256=missing_file.sha256, offset=offset, data=data)
                        offset += len(data)
                        if offset >= size:
                            break
            except OSError as error:
                self.fault = self._unreadable_file(source, error.strerror or str(error))
                return

    def _unreadable_file(self, source: Path, problem: str) -> InvalidInput:
        return InvalidInput(
            f"cannot read {source}: {problem}",
            field=self.local.key,
            hint="submit again; the server keeps the received bytes",
        )


def _refuse_missing(key: str, name: str) -> None:
    """Raise InvalidInput if `name` does not exist here and can only be a local file."""
    if is_absolute(name) or not is_file_name(name):
        return
    similar = similar_path(Path(name))
    raise InvalidInput(
        f"{name} does not exist on this machine",
        field=key,
        hint=f"did you mean {similar}?"
        if similar
        else "write an absolute path for a file on the server",
    )


def _list_files(key: str, place: Path) -> LocalFiles:
    if place.is_file():
        source_by_path = {place.name: place}
    elif not place.is_dir():
        raise InvalidInput(
            f"{place} is neither a regular file nor a directory",
            field=key,
            hint="name a file or a directory",
        )
    else:
        _refuse_other_directory(key, place)
        if key in MODEL_KEYS:
            names = list_model_files(place)
        else:
            names = [path.relative_to(place).as_posix() for path in _folder_files(key, place)]
        if key == "data.image_folder":
            names = [name for name in names if name.lower().endswith(_IMAGE_SUFFIXES)]
        source_by_path = {f"{place.name}/{name}": place / name for name in names}
    if not source_by_path:
        raise InvalidInput(f"{place} has no files to send", field=key, hint="name a file")
    _check_names(key, place, source_by_path)
    return LocalFiles(key, place, source_by_path)


def _refuse_other_directory(key: str, place: Path) -> None:
    """Raise InvalidInput if `place` is a directory that the key cannot name.

    A directory must be a model, a folder of images, a saved data set, or a store.
    """

    def has(*names: str) -> bool:
        return all((place / name).is_file() for name in names)

    if key in MODEL_KEYS:
        other_name = "tokenizer_config.json" if key.endswith(".tokenizer") else ADAPTER_CONFIG
        if not has("config.json") and not has(other_name):
            raise InvalidInput(
                f"{place} has neither config.json nor {other_name}, so it is not sent",
                field=key,
                hint="name the directory of a model, or a hub id",
            )
    elif key != "data.image_folder" and not (
        has("dataset_dict.json") or has("state.json", "dataset_info.json")
    ):
        try:
            is_store = read_manifest(place) is not None
        except (Corrupt, WrongState, OSError):
            is_store = False
        if not is_store:
            raise InvalidInput(
                f"{place} is neither a store nor a saved data set, so it is not sent",
                field=key,
                hint=f"give a file or a pattern such as {place}/*.jsonl",
            )


def _list_matches(key: str, pattern: str) -> LocalFiles:
    """Return the files that match an absolute `pattern`, and their common parent directory."""
    files = [Path(name) for name in files_of(pattern, key)]
    place = Path(pattern)
    while is_pattern(str(place)):
        place = place.parent
    source_by_path = {f"{place.name}/{f.relative_to(place).as_posix()}": f for f in files}
    _check_names(key, place, source_by_path)
    return LocalFiles(key, place, source_by_path, Path(pattern).relative_to(place).as_posix())


def _check_names(key: str, place: Path, source_by_path: Mapping[str, Path]) -> None:
    """Raise InvalidInput if there are too many files, or if the name of a file cannot be sent."""
    if len(source_by_path) > MAX_UPLOAD_FILES:
        raise InvalidInput(
            f"{place} has {len(source_by_path)} files; at most {MAX_UPLOAD_FILES} are sent",
            field=key,
            hint="put the records into one .parquet file, or copy the directory to the server",
        )
    for path, source in source_by_path.items():
        if len(os.fsencode(path)) > MAX_UPLOAD_PATH_BYTES or not path.isprintable():
            raise InvalidInput(
                f"{str(source)!r} cannot be sent under this name",
                field=key,
                hint=f"rename the file: use printable characters, and at most"
                f" {MAX_UPLOAD_PATH_BYTES} bytes with the directories",
            )


def _folder_files(key: str, place: Path) -> Iterator[Path]:
    """Yield the files below a directory. Links to files are followed. Hidden files are left out."""
    for path in sorted(place.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _folder_files(key, path)
        elif path.is_file():
            yield path
        else:
            raise InvalidInput(
                f"{path} is not a regular file, so it cannot be sent",
                field=key,
                hint="remove the file, or copy the directory to the server",
            )


def _refuse_images(job: AnyJob, key: str, name: str) -> None:
    """Raise InvalidInput if the first record of a file of prompts names its images by path.

    The images would not be uploaded.
    """
    column = getattr(job.data, "image_column", None)
    reads_images = key == "data.path" or key == "data.eval_path" or key.startswith("data.mix.")
    if column is None or not reads_images or not name.endswith(FILE_SUFFIXES):
        return
    for record in DataSet(name, field=key).records([column]):
        if any(isinstance(image, str) for image in images_of(record, column, name)):
            raise InvalidInput(
                f"the records of {name} name images by path, and such images are not sent",
                field=key,
                hint="write the bytes of the images into the column of a .parquet file",
            )
        return
