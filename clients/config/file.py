"""Reads job files. An error lists all problems of a file with their line numbers."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeAlias

from pydantic import ValidationError

from clients.config.kinds import AnyJob, kind_of
from clients.config.lines import KeyPath, Parsed, SyntaxFault, parse
from clients.config.problems import fields, holds_text, problems_of, render_problems
from clients.config.sweep import LABEL, SweepFault, SweepPoint, points_of
from clients.config.tables.after import is_output, named_values, outputs_in
from clients.config.tables.common import Table, document_of
from clients.data.formats import FILE_SUFFIXES, exists_here
from clients.data.object_urls import is_object_url, redact_place
from protos.errors import InvalidInput, NotFound
from protos.operating_system import IS_WINDOWS

MAX_BYTES = 64 << 10
SUFFIXES = (".toml", ".yaml", ".yml")


@dataclass(frozen=True)
class JobFile:
    """A job file: its path, its text, and the validated job.

    `sources` maps each key to the origin of its value: `default`, `job.toml:6` or `--set`. A job
    that was written in Python has the path of the working directory, no text, and "" as origin.
    """

    path: Path
    text: str
    config: AnyJob
    sources: Mapping[str, str]


# A job in Python. A dict has the tables of a job file.
JobSource: TypeAlias = AnyJob | JobFile | Mapping[str, Any]


@dataclass
class _Draft:
    """A job file before validation: its values, and the problems that are known so far.

    `swept`: keys whose values come from a point of the sweep `sweep`.
    """

    name: str
    parsed: Parsed
    values: dict[str, Any]
    overridden: set[KeyPath] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    sweep: str = ""
    swept: Sequence[KeyPath] = ()

    def source(self, path: KeyPath) -> str:
        if swept_key := next((key for key in self.swept if path[: len(key)] == key), None):
            return self.source_of_list(swept_key)
        if any(path[: len(key)] == key for key in self.overridden):
            return "--set"
        # An override or a list of the sweep may have put a table in place of a value.
        if path and path not in self.parsed.lines:
            if any(key[: len(path)] == path for key in self.overridden):
                return "--set"
            if swept_key_inside := next(
                (key for key in self.swept if key[: len(path)] == path), None
            ):
                return self.source_of_list(swept_key_inside)
        line = self.parsed.line_of(path) or self.parsed.lines.get((), 0)
        return f"{self.name}:{line}" if line else self.name

    def add_problem(self, path: KeyPath, message: str, source: str | None = None) -> None:
        """Add a problem of a key to `problems`.

        `source`: the file and line to report. Default: the file and line of the key.
        """
        location = self.source(path) if source is None else source
        self.problems.append(": ".join(filter(None, (location, ".".join(path), message))))

    def source_of_list(self, key: KeyPath) -> str:
        """Return the file and line of the list that the table `sweep` gives for a key.

        The file may write the key as nested tables or with dots. A list from the command line has
        the source `--set`.
        """
        if (LABEL, *key) in self.overridden:
            return "--set"
        dotted, lines = ".".join((LABEL, *key)), self.parsed.lines
        line_numbers = (line for path, line in lines.items() if ".".join(path) == dotted)
        line = max(line_numbers, default=self.parsed.line_of((LABEL, *key)))
        return f"{self.name}:{line}" if line else self.name


def load_job(source: Path | str | JobSource, overrides: Sequence[str] = ()) -> JobFile:
    """Read a job, apply `KEY=VALUE` overrides, and validate the job.

    `source`: the path of a job file, or a job in Python. A job in Python is a dict with the tables
    of a file, a job object such as OnPolicyJob, or a JobFile.

    Raises InvalidInput if the source has several jobs, or if the job has problems. The message
    lists all problems. For a job file, it gives the line of each key.
    """
    files = load_jobs(source, overrides)
    if len(files) > 1:
        name = str(source) if isinstance(source, str | Path) else ""
        raise InvalidInput(
            _at(name, f"has {len(files)} jobs, but this command takes one job"),
            hint="use distill submit to queue all jobs",
        )
    return files[0]


def load_jobs(source: Path | str | JobSource, overrides: Sequence[str] = ()) -> list[JobFile]:
    """Read one job, or several jobs in `[[job]]` tables, and validate each job.

    A job with a table `sweep` becomes one job for each combination of the sweep's values. Overrides
    are refused if the source has several `[[job]]` tables.

    Raises InvalidInput if a job has problems, or if two jobs have the same name. The message lists
    all problems.
    """
    if not isinstance(source, str | Path):
        return _load_values(source, overrides)
    path = Path(source)
    text = _read_text(path)
    try:
        parsed = parse(text, path.suffix.lower())
    except SyntaxFault as fault:
        location = f"{path}:{fault.line}" if fault.line else str(path)
        raise InvalidInput(f"{location}: {fault.message}") from None
    return _validate_all(str(path), text, parsed, overrides)


def sweep_job(base: JobSource, changes: Sequence[Mapping[str, Any]]) -> list[JobFile]:
    """Return one job for each change: a copy of `base` with the values of the change.

    The jobs get their names and labels as the jobs of a sweep do. A change maps keys to values,
    such as {"train.learning_rate": 3e-5, "seed": 2}. Raises InvalidInput if `base` already has a
    sweep, or for the problems of `load_jobs`.
    """
    values = document_of(base.config if isinstance(base, JobFile) else base)
    if LABEL in values:
        raise InvalidInput("the job has a sweep already", field=LABEL, hint="remove one of the two")
    return load_jobs({**values, LABEL: [*changes]})


def _load_values(source: JobSource, overrides: Sequence[str]) -> list[JobFile]:
    """Return the validated jobs of a source in Python. A JobFile keeps its path, text, sources."""
    if not isinstance(source, JobFile | Table | Mapping):
        raise InvalidInput(
            "a job is a path, a dict with the tables of a job file, or a job such as OnPolicyJob"
            f" (got a value of the class {type(source).__name__})"
        )
    config = source.config if isinstance(source, JobFile) else source
    try:
        files = _validate_all("", "", Parsed(document_of(config), {}), overrides)
    except RecursionError:
        raise InvalidInput("nested too deeply") from None
    if isinstance(source, JobFile):
        return [replace(source, config=file.config) for file in files]
    return files


def _validate_all(name: str, text: str, parsed: Parsed, overrides: Sequence[str]) -> list[JobFile]:
    """Return the validated jobs of a source. `name`: path of the file; "" for a job in Python."""
    drafts = [
        _Draft(name, job_part, _copy_tables(job_part.values))
        for job_part in _split_jobs(name, parsed)
    ]
    if len(drafts) > 1 and overrides:
        raise InvalidInput(
            _at(
                name,
                f"has {len(drafts)} jobs, but --set, --name and similar options change one job",
            ),
            hint="write the values into the file",
        )
    try:
        for override in overrides:
            _apply_override(override, drafts[0])
        drafts = [point for draft in drafts for point in _expand_sweep(draft)]
        configs = [_validate(draft) for draft in drafts]
    except RecursionError:
        raise InvalidInput(_at(name, "nested too deeply")) from None
    _require_names(drafts, configs)
    _require_points(drafts, configs)
    _require_order(drafts, configs)
    # Without duplicates: the jobs of a sweep share problems.
    problems = dict.fromkeys(problem for draft in drafts for problem in draft.problems)
    if problems:
        raise InvalidInput(render_problems(name, [*problems]))
    valid_jobs = [(draft, config) for draft, config in zip(drafts, configs, strict=True) if config]
    return [
        JobFile(Path(name), text, config, _value_sources(draft, config))
        for draft, config in valid_jobs
    ]


def _at(location: str, message: str) -> str:
    return ": ".join(filter(None, (location, message)))


def _split_jobs(name: str, parsed: Parsed) -> list[Parsed]:
    """Return one part for each `[[job]]` table. A file without `[[job]]` tables is one part."""
    tables = parsed.values.get("job")
    if tables is None:
        return [parsed]

    def location_of(key: str) -> str:
        line = parsed.line_of((key,))
        return f"{name}:{line}" if line else name

    listed = tables if isinstance(tables, list) else []
    if not listed or not all(isinstance(table, dict) for table in listed):
        raise InvalidInput(_at(location_of("job"), "job: must be [[job]] tables"))
    if other_keys := [key for key in parsed.values if key != "job"]:
        [key, *_] = other_keys
        raise InvalidInput(
            _at(location_of(key), f"{key}: a file with [[job]] tables must have no other keys")
        )
    parts = []
    for number, values in enumerate(listed):
        table_path = ("job", str(number))
        lines = {key[2:]: line for key, line in parsed.lines.items() if key[:2] == table_path}
        parts.append(Parsed(values, lines))
    return parts


def _require_names(drafts: Sequence[_Draft], configs: Sequence[AnyJob | None]) -> None:
    """Add a problem to each job whose name is also the name of a sweep or of an earlier job."""
    names = {draft.sweep for draft in drafts if draft.sweep}
    for draft, config in zip(drafts, configs, strict=True):
        if config is not None and config.name in names:
            draft.add_problem(("name",), f"another job of the file is {config.name!r}")
        names |= set() if config is None else {config.name}


def _expand_sweep(draft: _Draft) -> list[_Draft]:
    """Return one draft for each point of the job's sweep. Without a sweep, return only `draft`."""
    if LABEL not in draft.values:
        return [draft]
    try:
        points = points_of(draft.values.pop(LABEL))
        for key in points[0].values:
            if any(
                key[: len(overridden_key)] == overridden_key[: len(key)]
                for overridden_key in draft.overridden
            ):
                raise SweepFault(key, "--set gives this key one value; remove --set or the list")
        return [_draft_at_point(draft, point) for point in points]
    except SweepFault as fault:
        draft.add_problem(
            (LABEL, *fault.path), fault.message, source=draft.source_of_list(fault.path)
        )
        return [draft]


def _draft_at_point(draft: _Draft, point: SweepPoint) -> _Draft:
    """Return a copy of the draft with the values of a point, and the name and labels of its job."""
    values = _copy_tables(draft.values)
    for key, value in point.values.items():
        if invalid_key := _set_key(values, key, value):
            raise SweepFault(key, f"'{invalid_key}' is not a table")
    name = values.get("name", kind_of(values).model_fields["name"].default)
    own_labels = values.get("labels", {})
    if isinstance(name, str) and isinstance(own_labels, dict):  # otherwise validation refuses them
        labels = {LABEL: name, **point.texts}
        if common_labels := sorted(labels.keys() & own_labels.keys()):
            raise SweepFault(
                (), f"the sweep sets the label {common_labels[0]!r}; remove it from labels"
            )
        values |= {"name": name + point.suffix, "labels": {**own_labels, **labels}}
    return replace(draft, values=values, problems=[], sweep=str(name), swept=tuple(point.values))


def _require_points(drafts: Sequence[_Draft], configs: Sequence[AnyJob | None]) -> None:
    """Add a problem to each job whose `after` or input names a sweep instead of one of its jobs."""
    valid_jobs = [(draft, config) for draft, config in zip(drafts, configs, strict=True) if config]
    sweeps: dict[str, list[str]] = {}
    for draft, config in valid_jobs:
        if draft.sweep:
            sweeps.setdefault(draft.sweep, []).append(config.name)
    for draft, config in valid_jobs:
        references = [("after", name, "{}") for name in config.after]
        references += [
            (output.key, output.job, f"@{{}}/{output.kind}") for output in outputs_in(config)
        ]
        for key, name, template in references:
            if jobs := sweeps.get(name):
                draft.add_problem(
                    tuple(key.split(".")),
                    f"{name!r} is a sweep of {len(jobs)} jobs; give the name of one job, such as"
                    f" {template.format(jobs[0])!r}",
                )


def _require_order(drafts: Sequence[_Draft], configs: Sequence[AnyJob | None]) -> None:
    """Add a problem to each job that depends on itself or on a job below it in the file."""
    names = [config.name if config else "" for config in configs]
    for number, (draft, config) in enumerate(zip(drafts, configs, strict=True)):
        earlier_names, later_names = names[:number], names[number:]
        for key, name in references_of(config) if config and len(drafts) > 1 else ():
            if name in later_names and name not in earlier_names:
                draft.add_problem(
                    tuple(key.split(".")),
                    f"job {name!r} is not above {names[number]!r} in the file; write the job below"
                    " the jobs it depends on",
                )


def references_of(config: AnyJob) -> list[tuple[str, str]]:
    """Return (key, name) of each other job that a job names, in `after` or as `@NAME/OUTPUT`."""
    outputs = [(output.key, output.job) for output in outputs_in(config)]
    return [*(("after", name) for name in config.after), *outputs]


def localized(config: AnyJob) -> AnyJob:
    """Return the job with absolute paths for all files that exist on this machine.

    A server needs absolute paths, because it has another working directory. Raises InvalidInput on
    Windows, whose paths no server can read.
    """
    for dotted, name in named_files(config):
        if exists_here(name):
            if IS_WINDOWS:
                raise InvalidInput(
                    f"{name} is a file of this machine, and Windows paths name nothing on a server",
                    field=dotted,
                    hint="send the file with distill submit --upload, or give a path of the server",
                )
            config = replaced(config, dotted, str(Path(name).absolute()))
    return config


def replaced(container: Any, dotted: str, value: str | int) -> Any:
    """Return a copy of `container` in which the key `dotted` has the value `value`.

    `container`: a job, a table or a tuple of tables; `dotted`: for example `data.mix.0.path`.
    """
    key, _, inner_key = dotted.partition(".")
    if isinstance(container, tuple):
        changed_table = replaced(container[int(key)], inner_key, value)
        return (*container[: int(key)], changed_table, *container[int(key) + 1 :])
    new_value = replaced(getattr(container, key), inner_key, value) if inner_key else value
    return container.model_copy(update={key: new_value})


def named_files(config: AnyJob) -> list[tuple[str, str]]:
    """Return (key, value) of each key that may name a file or directory.

    URLs and the outputs of other jobs are excluded.
    """
    return [(key, name) for key, name in _named_places(config) if "://" not in name]


def is_file_name(name: str) -> bool:
    """Return True if a name can only be a path, and not a hub id. The path need not exist.

    Such a name has a file suffix, a leading "/", "./", "../" or "~", a "\\", more than one "/", or
    an existing directory before the "/". Raises OSError if this directory cannot be accessed.
    """
    has_suffix = name.endswith((*FILE_SUFFIXES, ".py", ".jinja"))
    is_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or "\\" in name
    return has_suffix or is_path or ("/" in name and Path(name).parent.is_dir())


def is_absolute(name: str) -> bool:
    """Return whether a path is absolute on Linux or on Windows.

    Both kinds occur: a client on Windows can name files of a Linux server and files of its own
    machine.
    """
    return PurePosixPath(name).is_absolute() or PureWindowsPath(name).is_absolute()


def similar_path(path: Path) -> str:
    """Return the path of the local file with the most similar name, or ""."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return ""
    matches = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return str(path.parent / matches[0]) if matches else ""


def named_urls(config: AnyJob) -> list[tuple[str, str]]:
    """Return (key, value) of each key that names a file or directory in an object storage."""
    return [(key, name) for key, name in _named_places(config) if is_object_url(name)]


def _named_places(config: AnyJob) -> list[tuple[str, str]]:
    # "same" and "auto" are values of the keys `tokenizer`.
    return [
        (key, name)
        for key, name in named_values(config)
        if name not in ("", "same", "auto")
        and not is_output(name)
        and (key, name) != ("student.chat_template", "teacher")
    ]


def parse_override(override: str) -> tuple[KeyPath, Any]:
    """Parse `a.b=VALUE` into a key path and a value.

    VALUE is parsed as TOML. If parsing fails, or if the key takes text, VALUE is used as a string.
    Raises InvalidInput if `override` is not KEY=VALUE.
    """
    dotted, equals, text = override.partition("=")
    path = tuple(part.strip() for part in dotted.split("."))
    if not equals or not all(path):
        raise InvalidInput(f"--set: {override!r} is not KEY=VALUE")
    if holds_text(path) and text[:1] not in ('"', "'"):
        return path, text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return path, text
    return path, parsed["value"] if len(parsed) == 1 else text


def _read_text(path: Path) -> str:
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput(f"{path}: a job file ends in .toml, .yaml or .yml")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InvalidInput(f"{path}: not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    except OSError as error:
        raise InvalidInput(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if len(data) > MAX_BYTES:
        raise InvalidInput(
            f"{path}: larger than {MAX_BYTES >> 10} KiB; check that it is a job file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidInput(f"{path}:{line}: not UTF-8 text") from None


def _copy_tables(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copy_tables(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _apply_override(override: str, draft: _Draft) -> None:
    try:
        path, value = parse_override(override)
    except InvalidInput as error:
        draft.problems.append(error.message)
        return
    if invalid_key := _set_key(draft.values, path, value):
        draft.problems.append(f"--set: {'.'.join(path)}: '{invalid_key}' is not a table")
        return
    draft.overridden.add(path)


def _set_key(values: dict[str, Any], path: KeyPath, value: Any) -> str:
    """Set the value of a key.

    Returns "" if the value was set. If the value of an outer key is not a table, returns the name
    of this outer key.
    """
    table: Any = values
    for depth, part in enumerate(path[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return ".".join(path[:depth])
    table[path[-1]] = value
    return ""


def _validate(draft: _Draft) -> AnyJob | None:
    try:
        # Validate as JSON, which has no dates, in strict mode: `top_k = true` is an error, not 1.
        document = json.dumps(draft.values, default=str)
    except ValueError:
        # TOML can hold a hexadecimal integer so long that Python refuses to print it (4300 digits).
        draft.add_problem((), "an integer has thousands of digits")
        return None
    kind = kind_of(draft.values)
    try:
        config = kind.model_validate_json(document, strict=True)
    except ValidationError as error:
        for path, message in problems_of(error, kind):
            draft.add_problem(path, message)
        return None
    for key, name in _named_places(config):
        is_file = key != "environment.retriever"  # or the address of a server
        if is_file and "://" in name and not is_object_url(name):
            message = f"a URL must begin with s3:// or gs:// (got {redact_place(name)!r})"
            draft.add_problem(tuple(key.split(".")), message)
    return config


def _value_sources(draft: _Draft, config: AnyJob) -> Mapping[str, str]:
    return {
        ".".join(path): draft.source(path) if _has_key(draft.values, path) else "default"
        for path in fields(type(config))
    }


def _has_key(values: Any, path: KeyPath) -> bool:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
