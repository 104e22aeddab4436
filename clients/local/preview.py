"""`preview`: the training input of a job, token by token, before training."""

from __future__ import annotations

from clients.config.file import JobSource, load_job
from clients.data.preview import parse_preview
from clients.jobs.plots.preview_html import PreviewDisplay
from clients.local.program import parse_reply, run_program
from clients.preflight.files import check_files, check_models, check_template
from protos.errors import ExitCode, InvalidInput
from protos.extras import require_extra


def preview(job: JobSource, *, records: int = 5, quiet: bool = False) -> PreviewDisplay:
    """Return the training data of a job, token by token. Needs no training, no teacher and no GPU.

    - `job`: a job, the result of `load_job`, or a dict, as for `DistillClient.submit`
    - `records`: number of records to show; they are read as in training
    - `quiet`: hide the messages of the program that reads the records

    Raises InvalidInput for a job that trains no model or whose packages are missing, and the errors
    of the job's files.
    """
    config = load_job(job).config
    if not config.preview_program:
        raise InvalidInput(
            "an evaluation trains nothing", field="method.type", hint="preview a job that trains"
        )
    require_extra("train", "a preview", field="JOB.toml")
    check_files(config)
    check_models(config)
    if config.answering_student is not None:  # at once, not after the program has loaded torch
        check_template(config, config.answering_student.model)
    command = [config.preview_program, "--records", str(records)]
    reply = run_program(command, config.model_dump_json(), quiet=quiet)
    if reply[0] == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return PreviewDisplay.of(parse_preview(parse_reply(reply, "the preview")))
