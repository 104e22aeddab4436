"""Checks a job on the machine that will run it: packages, files, models, trackers and disk space.

The checks do not import torch and take milliseconds. A server runs them before it queues a job. The
job's program runs them again when it starts, because files may have changed. `teachers.py` has the
checks that need a response from a teacher.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from pathlib import Path

from clients.config.capture import CaptureJob
from clients.config.evaluation import ExamConfig
from clients.config.file import is_file_name, named_files, named_urls, similar_path
from clients.config.kinds import AnyJob
from clients.config.tables.common import StudentConfig
from clients.config.tables.job import JobConfig, TrainingJob
from clients.data.formats import FILE_SUFFIXES, files_of, is_pattern
from clients.data.hub import is_hub_id
from clients.data.models.check import Reader, check_model
from clients.data.object_urls import is_object_url, place_of, redact_place
from clients.data.prompt_format import (
    check_chat_template,
    check_generation,
    default_template,
    template_text,
)
from clients.data.tokens.tokenizer import chat_templates_in, read_template
from clients.preflight.data_files import check_data
from clients.preflight.disk import check_space
from clients.preflight.limits import fit_limits, resumed_limits
from clients.preflight.packages import check_packages, check_trackers
from clients.preflight.parallel import check_context_parallel, check_tensor_parallel
from clients.preflight.records import estimate_records
from clients.preflight.rollouts import check_gpus
from clients.store.captured_store import captured_stores
from protos.errors import InvalidInput

# Keys whose files are also read by programs that cannot download from a URL.
_ON_DISK = frozenset(
    {"teacher.model", "teacher.tokenizer", "data.tokenizer", "data.image_folder", "reward.file"}
)
log = logging.getLogger(__name__)

RELATIVE_PATH_HINT = "relative paths start at the current directory"


def check_template(config: JobConfig, model: str) -> None:
    """Raise InvalidInput if the job needs a chat template and the tokenizer of `model` has none.

    Hub ids and files that cannot be interpreted are checked later by the job's program.
    """
    student = getattr(config, "student", None)
    chat_template = getattr(student, "chat_template", None)
    if chat_template == "teacher" or config.prompt_format is None:
        return
    templates = _read_templates(model, chat_template)
    if templates is None:
        return
    check_chat_template(config.prompt_format, template_text(templates))
    if config.learns_all_turns:
        check_generation(default_template(templates))


def check_evaluated_template(config: ExamConfig, model: str) -> None:
    """Raise InvalidInput if an evaluation's keys need a chat template and `model` has none."""
    if config.data is not None and config.endpoint is None:
        templates = _read_templates(model, config.student.chat_template)
        if templates is not None:
            check_chat_template(config.data.prompt_format, template_text(templates))


def _read_templates(model: str, chat_template: str | None) -> dict[str, str] | None:
    """Return the chat templates of a directory or of a file; None if they cannot be read."""
    try:
        if chat_template is not None:
            return {"default": read_template(Path(chat_template))}
        return chat_templates_in(Path(model)) if Path(model).is_dir() else None
    except (OSError, ValueError):
        return None


def check_here(
    config: AnyJob, run: Path, *, hint: str = RELATIVE_PATH_HINT, here: bool = True
) -> None:
    """Check the packages, files, data, trackers, GPUs, disk space and store of a job.

    `run`: the run directory or its future parent directory. `hint`: the hint of errors about
    missing files. `here`: false if the job's program runs on other machines (of a Ray cluster);
    this machine then needs neither its packages nor its GPUs.

    Raises InvalidInput, WrongState, or another DistillError of the first failed check.
    """
    if here:
        check_packages(config)
        check_gpus(config)
    check_files(config, hint)
    config = (resumed_limits(config, run) or fit_limits(config)).apply(config)
    check_data(config)
    records = estimate_records(config) if here else None
    if records is not None and not records.has_room:
        log.warning("%s", records)
    for note in check_models(config, here=here):
        log.info(note)
    if config.answering_student is not None:
        check_template(config, config.answering_student.model)
    if isinstance(config, TrainingJob):
        if not here and config.engine_gpus:
            _check_engines(config.student)
        check_tensor_parallel(config)
        check_context_parallel(config)
        check_processes(config)
        check_trackers(config.track)
        check_space(config, run, here=here)
    # A server may have other credentials than the program of the job, which opens the store itself.
    if not config.has_remote_store:
        captured_stores(config)


def check_files(config: AnyJob, hint: str = RELATIVE_PATH_HINT) -> None:
    """Raise InvalidInput if a file or directory that the job names does not exist.

    Only names that must be paths are checked. These are names with a file suffix, with a leading
    "/", "./", "../" or "~", with more than one "/", or with an existing directory before the "/".
    Names of models that are not valid hub ids, such as names with spaces, are also checked. Any
    other name may be a hub id.

    For a URL, only the form is checked: the job's program has the credentials and opens the object.
    `hint`: the hint of the error.
    """
    for key, url in named_urls(config):
        _check_url(key, url)
    models = {key for key, _, _ in list_models(config)}
    for key, name in named_files(config):
        has_suffix = name.endswith((*FILE_SUFFIXES, ".py", ".jinja"))
        try:
            if is_pattern(name):
                files_of(name, key)
                continue
            exists = Path(name).is_file() if has_suffix else Path(name).exists()
            # A hub id has no NUL character.
            is_local = is_file_name(name) or "\0" in name
            is_local = is_local or (key in models and not is_hub_id(name))
        except OSError as error:  # the name is too long, or a directory is not readable
            problem = f"cannot access {name}: {error.strerror}"
            raise InvalidInput(problem, field=key, hint=hint) from error
        if exists:
            continue
        if is_local:
            # A server must not tell its clients the names of its files.
            similar = similar_path(Path(name)) if hint == RELATIVE_PATH_HINT else ""
            own_hint = f"did you mean {similar}?" if similar else hint
            raise InvalidInput(f"no such file: {name}", field=key, hint=own_hint)
        if key.startswith("data.") and (other := _other_suffix(Path(name))):
            raise InvalidInput(f"no such file: {name}", field=key, hint=f"did you mean {other}?")


def _other_suffix(path: Path) -> Path | None:
    """Return an existing file with a similar suffix, such as a.json for a.jsn, or None."""
    if not path.parent.is_dir():
        return None
    suffixes = difflib.get_close_matches(path.suffix, FILE_SUFFIXES, n=len(FILE_SUFFIXES))
    siblings = (path.with_suffix(suffix) for suffix in suffixes)
    return next((sibling for sibling in siblings if sibling.is_file()), None)


def _check_url(key: str, url: str) -> None:
    if key in _ON_DISK:
        raise InvalidInput(
            f"cannot be read from an object storage: {redact_place(url)}",
            field=key,
            hint="copy the file to a disk",
        )
    try:
        place_of(url)
    except InvalidInput as error:
        error.field = key
        raise


def _check_engines(student: StudentConfig) -> None:
    """Raise InvalidInput if engines on the nodes of a cluster could not read the student."""
    if is_object_url(student.model):
        raise InvalidInput(
            "rollouts.gpus on a cluster needs a path that all nodes read",
            field="student.model",
            hint="copy the model to a disk that the nodes share",
        )


def check_processes(config: TrainingJob) -> None:
    """Raise InvalidInput if a step or an evaluation has fewer sequences than processes.

    A process without a sequence would block the other processes in a collective.
    """
    for field, work in (
        ("train.prompts_per_step", config.sequences_per_step),
        ("eval.prompts", config.eval.prompts),
    ):
        if work < config.train.processes:
            raise InvalidInput(
                f"{work} sequences are too few for {config.train.processes} processes",
                field=field,
                hint="raise the value, or lower train.processes",
            )


def check_models(config: JobConfig, *, here: bool = True) -> list[str]:
    """Check the student of a job, and the teacher that is started for it, if they are local paths.

    Returns the warnings of `check_model`. Raises InvalidInput if a model cannot be used, or if a
    capture has no tokenizer. Models at hub ids and URLs are checked by the programs that fetch
    them. `here`: whether the programs of the job run in this Python environment.
    """
    if isinstance(config, CaptureJob):
        _require_tokenizer(config)
    notes: list[str] = []
    student = config.answering_student
    has_template = student is not None and student.chat_template is not None
    for field, model, reader in list_models(config):
        try:
            exists = Path(model).exists()
        except (OSError, ValueError):  # no path, so perhaps a hub id
            continue
        if exists:
            notes += check_model(Path(model), field, reader, here=here, has_template=has_template)
    return notes


def _require_tokenizer(config: CaptureJob) -> None:
    if not (config.data.tokenizer or config.student or config.teacher.model):
        raise InvalidInput(
            "a capture from teacher.address needs a tokenizer",
            field="data.tokenizer",
            hint="set the key to the teacher's tokenizer: a Hugging Face directory or a hub id",
        )


def note_similar_directories(config: JobConfig) -> list[str]:
    """Return a note for each hub id without "/" that is similar to the name of a directory here.

    Such a name may be a misspelt directory. Without a network, the job would wait until its
    requests to the hub time out.
    """
    notes = []
    for field, model, _ in list_models(config):
        similar = similar_path(Path(model)) if "/" not in model and is_hub_id(model) else ""
        if similar and Path(similar).is_dir():
            notes.append(
                f"{field}: {model} is not on this machine: taken as a hub id; did you mean"
                f" {similar}?"
            )
    return notes


def list_models(config: JobConfig) -> Iterator[tuple[str, str, Reader]]:
    """Yield (key, path or hub id, program that reads the model) for each model of the job."""
    student, teacher = config.answering_student, config.teacher_link
    if student is not None:
        is_trained = isinstance(student, StudentConfig)
        yield "student.model", student.model, "trainer" if is_trained else "evaluation"
    if teacher is not None and teacher.model is not None and teacher.engine != "fake":
        yield "teacher.model", teacher.model, teacher.engine
