"""Sends the files that a job names to its server: those that the server lacks, in parts."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc

from clients.config.file import named_files, replaced
from clients.config.kinds import AnyJob
from clients.data.model_files import MODEL_KEYS, MODEL_SUFFIXES
from clients.data.records import FILE_SUFFIXES, DataSet, images_of
from clients.jobs.connection import ServerConnection
from protos import distill_pb2 as pb
from protos.distill_pb2_grpc import DistillStub
from protos.errors import Corrupt, DistillError, InvalidInput, WrongState
from protos.rpc.statuses import fault_of
from protos.rpc.transport import MAX_UPLOAD_FILES, MAX_UPLOAD_PATH_BYTES

_Job = TypeVar("_Job", bound=AnyJob)

# A part that is cut off is lost, so parts are short.
_PART_BYTES = 256 << 10


@dataclass(frozen=True)
class Progress:
    """How much of what a job names under `key` the server has. sent, size: bytes.

    `begins`: nothing has been sent yet, so the server had `sent` before.
    """

    key: str
    sent: int
    size: int
    begins: bool = False


Report: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True)
class LocalFiles:
    """A file or directory of this machine that a job names under `key`.

    `files`: local paths by their paths in the upload, which begin with the name of `place`.
    """

    key: str
    place: Path
    files: Mapping[str, Path]


def local_files(job: AnyJob) -> list[LocalFiles]:
    """Return what a job names and what exists on this machine; hub ids and other paths are left.

    Raises InvalidInput, naming the key, if something of it cannot be sent, and for a relative path
    of a file that does not exist: a server has other working directories.
    """
    found = []
    for key, name in named_files(job):
        if not Path(name).exists():
            _refuse_missing(key, name)
            continue
        if key == "reward.file":
            raise InvalidInput(
                "is not sent: a server runs no code that a job names",
                field=key,
                hint="use distill run, which runs the job on this machine",
            )
        _refuse_images(job, key, name)
        # Not resolved: the name may be a link, as in a cache of the hub.
        found.append(_listed(key, Path(os.path.abspath(name))))
    return found


def paths_of_server(job: AnyJob) -> list[tuple[str, str, str]]:
    """Return (key, path, name of a similar file here or "") of each path that is not here."""
    return [
        (key, name, _similar(Path(name)))
        for key, name in named_files(job)
        if Path(name).is_absolute() and not Path(name).exists()
    ]


class Uploader:
    """Sends files to one server, each content once."""

    def __init__(self, connection: ServerConnection, stub: DistillStub, report: Report) -> None:
        self._connection = connection
        self._stub = stub
        self._report = report
        self._digests: dict[Path, str] = {}
        self._paths: dict[tuple[Path, ...], str] = {}

    def upload(self, job: _Job) -> _Job:
        """Send what a job names; return the job with the paths on the server."""
        for local in local_files(job):
            several = tuple(local.files.values())
            if several not in self._paths:
                self._paths[several] = self._sent(local)
            job = replaced(job, local.key, self._paths[several])
        return job

    def _sent(self, local: LocalFiles) -> str:
        """Send files, also over connections that break; return their path on the server."""
        sending = _Sending(local, self._digests)
        request = pb.BeginUploadRequest(files=sending.files)

        def begin() -> str:
            begun = self._connection.call(self._stub.BeginUpload, request)
            sending.begin(begun.missing)
            return begun.path

        def work() -> str:
            path = begin()
            while not path:
                self._send(sending)
                path = begin()
            return path

        try:
            # Outside of `resuming`: a server that cannot be reached at all is an error at once.
            path = begin()
            self._report(replace(sending.progress, begins=True))
            return path or self._connection.resuming(work, lambda: sending.there)
        except (InvalidInput, WrongState, Corrupt) as error:
            error.field = error.field or local.key
            raise

    def _send(self, sending: _Sending) -> None:
        def parts() -> Iterator[pb.FilePart]:
            for part in sending.parts():
                yield part
                self._report(sending.progress)

        call = self._stub.SendFiles.future(parts())
        try:
            call.result()
        except grpc.RpcError as error:
            raise sending.fault or fault_of(error, self._connection.name) from error
        finally:
            call.cancel()
        if sending.fault is not None:
            raise sending.fault


@dataclass
class _Sending:
    """One upload: its files, and where it is. there: bytes that the server said it has."""

    local: LocalFiles
    digests: dict[Path, str]
    files: Sequence[pb.UploadFile] = ()
    there: int = 0
    sent: int = 0
    fault: DistillError | None = None
    missing: Sequence[pb.MissingFile] = ()
    sources: dict[str, tuple[Path, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Hash the files. Raises InvalidInput if one cannot be read."""
        listed = []
        for path, source in self.local.files.items():
            try:
                with source.open("rb") as file:
                    if source not in self.digests:
                        self.digests[source] = hashlib.file_digest(file, "sha256").hexdigest()
                    size = file.seek(0, os.SEEK_END)
            except OSError as error:
                raise self._unreadable(source, error.strerror or str(error)) from error
            listed.append(pb.UploadFile(path=path, size=size, sha256=self.digests[source]))
            self.sources[self.digests[source]] = (source, size)
        self.files = listed

    @property
    def progress(self) -> Progress:
        """The bytes of different files, each counted once."""
        size = sum(size for _, size in self.sources.values())
        return Progress(self.local.key, self.sent, size)

    def begin(self, missing: Sequence[pb.MissingFile]) -> None:
        """Take note of what the server lacks."""
        self.missing = missing
        lacking = sum(self.sources[one.sha256][1] - one.offset for one in missing)
        self.there = self.sent = self.progress.size - lacking

    def parts(self) -> Iterator[pb.FilePart]:
        """Yield the missing parts. If a file cannot be read, end early, and keep the `fault`."""
        for one in self.missing:
            source, size = self.sources[one.sha256]
            offset = one.offset
            try:
                with source.open("rb") as file:
                    file.seek(offset)
                    while True:
                        data = file.read(min(_PART_BYTES, size - offset))
                        if not data and offset < size:
                            raise OSError("it has become shorter")
                        self.sent += len(data)
                        yield pb.FilePart(sha256=one.sha256, offset=offset, data=data)
                        offset += len(data)
                        if offset >= size:
                            break
            except OSError as error:
                self.fault = self._unreadable(source, error.strerror or str(error))
                return

    def _unreadable(self, source: Path, why: str) -> InvalidInput:
        return InvalidInput(
            f"cannot read {source}: {why}",
            field=self.local.key,
            hint="submit again; what has arrived is not sent again",
        )


def _refuse_missing(key: str, name: str) -> None:
    """Raise InvalidInput if a name that does not exist here can only be a file of this machine."""
    path = Path(name)
    # "models/student" may be a hub id, unless there is a directory "models".
    below = path.parent != Path() and path.parent.is_dir()
    if path.is_absolute() or not (below or name.endswith(FILE_SUFFIXES) or name[:1] in ".~"):
        return
    similar = _similar(path)
    raise InvalidInput(
        f"{name} does not exist on this machine",
        field=key,
        hint=f"did you mean {similar}?" if similar else "a path of the server is absolute",
    )


def _similar(path: Path) -> str:
    """Return the path of the file here whose name is most like that of `path`; "" if none is."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return str(path.parent / near[0]) if near else ""


def _listed(key: str, place: Path) -> LocalFiles:
    if place.is_file():
        named = {place.name: place}
    elif not place.is_dir():
        raise InvalidInput(
            f"{place} is neither a regular file nor a directory",
            field=key,
            hint="name a file or a directory",
        )
    else:
        files = _of_model(place) if key in MODEL_KEYS else _of_folder(key, place)
        named = {f"{place.name}/{path.relative_to(place).as_posix()}": path for path in files}
    if not named:
        raise InvalidInput(f"{place} has no files to send", field=key, hint="name another one")
    if len(named) > MAX_UPLOAD_FILES:
        raise InvalidInput(
            f"{place} has {len(named)} files; at most {MAX_UPLOAD_FILES} are sent",
            field=key,
            hint="put the records into one .parquet file, or copy the directory to the server",
        )
    for path, source in named.items():
        if len(os.fsencode(path)) > MAX_UPLOAD_PATH_BYTES or not path.isprintable():
            raise InvalidInput(
                f"{str(source)!r} cannot be sent under this name",
                field=key,
                hint=f"rename it: printable characters, and {MAX_UPLOAD_PATH_BYTES} bytes with its"
                " directories",
            )
    return LocalFiles(key, place, named)


def _of_model(place: Path) -> Iterator[Path]:
    """Yield the files of a model that programs read, and those of the anchor in it."""
    for path in (*sorted(place.iterdir()), *sorted(place.glob("anchor/*"))):
        if path.suffix in MODEL_SUFFIXES and not path.name.startswith(".") and path.is_file():
            yield path


def _of_folder(key: str, place: Path) -> Iterator[Path]:
    """Yield the files below a directory; links to files are followed, hidden files left out."""
    for path in sorted(place.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _of_folder(key, path)
        elif path.is_file():
            yield path
        else:
            raise InvalidInput(
                f"{path} is no regular file, and cannot be sent",
                field=key,
                hint="remove it from the directory, or copy the directory to the server",
            )


def _refuse_images(job: AnyJob, key: str, name: str) -> None:
    """Raise InvalidInput if the first record of a file of prompts names its images by path."""
    column = getattr(job.data, "image_column", None)
    reads_images = key == "data.path" or key == "data.eval_path" or key.startswith("data.mix.")
    if column is None or not reads_images or not name.endswith(FILE_SUFFIXES):
        return
    for record in DataSet(name, field=key).records([column]):
        if any(isinstance(image, str) for image in images_of(record, column, name)):
            raise InvalidInput(
                f"the records of {name} name images by path, and these are not sent",
                field=key,
                hint="write the bytes of the images into the column of a .parquet file",
            )
        return
