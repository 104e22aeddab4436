"""`distill eval`: sample answers of models, locally or from a server, and score them."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.output import Output
from clients.cli.settings import settings_of
from clients.local.program import parse_reply, run_program
from protos.errors import ExitCode, InvalidInput, NotFound
from protos.extras import require_extra

if TYPE_CHECKING:
    from clients.config.evaluation import ExamConfig

# A model's display name is a directory name and a table cell.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
# Settings that do not affect an answer: a later command may change them and use the same directory.
_IRRELEVANT_TO_ANSWERS: dict[str, Any] = {
    **dict.fromkeys(("out", "reward", "in_flight", "patience_seconds"), True),
    "method": {"prompts", "samples"},
}


ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]MODEL...",
        help="Hugging Face directories, run directories (with their anchors), or names of the"
        " endpoint's models.",
    ),
]
RewardOption = Annotated[
    str, typer.Option(help="Reward that scores the answers, as reward.type in a job file.")
]
KeysOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set student.chat_template or a key of [data] or [reward] as in a job file, such as"
        " data.prompt_column=question. Repeatable.",
    ),
]
OutOption = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Directory of the answers, by default runs/eval-...; existing answers are not"
        " requested again.",
    ),
]
EndpointOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="OpenAI-compatible server, http://HOST:PORT/v1; its key is read from $OPENAI_API_KEY.",
    ),
]


def exam(
    context: typer.Context,
    models: ModelsArgument,
    reward: RewardOption,
    data: Annotated[str, typer.Option(help="Files of records, or a hub data set.")] = "",
    sets: KeysOption = None,
    prompts: Annotated[
        int, typer.Option(help="Number of prompts, sampled with the seed; 0 means all.")
    ] = 0,
    samples: Annotated[int, typer.Option(help="Answers per prompt.")] = 32,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 means greedy decoding.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(help="Nucleus sampling: probability mass of the tokens to sample from."),
    ] = 0.9,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of an answer.")] = 1024,
    seed: Annotated[
        int, typer.Option(help="Seed of the selection of prompts and of sampling.")
    ] = 0,
    out: OutOption = "",
    endpoint: EndpointOption = "",
    api: Annotated[str, typer.Option(help="API of the endpoint: chat or completions.")] = "chat",
    in_flight: Annotated[
        int, typer.Option(help="Maximum number of concurrent requests to the endpoint.")
    ] = 64,
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for one answer of the endpoint.")
    ] = 600.0,
) -> ExitCode:
    """Evaluate models on prompts: pass@1, pass@k, majority vote and lengths.

    The 95% intervals are over prompts. An interrupted evaluation resumes when the same command is
    run again.
    """
    output = settings_of(context).output
    values = {
        **_parse_tables(reward, data, sets or []),
        "models": _name_models(models, local=not endpoint),
        "out": out or "?",
        "method": {
            "type": "eval",
            "prompts": prompts or None,
            "samples": samples,
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": max_tokens,
        },
        "seed": seed,
        "endpoint": endpoint or None,
        "api": api,
        "in_flight": in_flight,
        "patience_seconds": patience,
    }
    config = _validate_config(values)
    _require_packages(config)
    _require_columns(config)
    if not out:
        config = config.model_copy(update={"out": f"runs/eval-{_config_digest(config)}"})
    output.say(f"answers are stored in {config.out}")
    # The program may load torch.
    reply = run_program(["student_trainer.exam"], config.model_dump_json(), quiet=output.quiet)
    return _print_results(reply, config, output)


def _require_packages(config: ExamConfig) -> None:
    from clients.preflight.packages import check_reward

    if config.endpoint:
        require_extra("rl", "an evaluation over an endpoint", field="--endpoint", only={"httpx"})
    else:
        require_extra("train", "the evaluation of a local model", field="MODEL")
    check_reward(config.reward)


def _name_models(models: Sequence[str], *, local: bool) -> dict[str, str]:
    """Return the path, hub id or served name of each model, by display name.

    Each element of `models` is MODEL or NAME=MODEL. `local`: the models run on this machine. A
    MODEL that is a run directory then gives the exported model, and also the exported anchor if it
    exists. Raises InvalidInput for a display name that is not valid or occurs twice.
    """
    paths_by_name: dict[str, str] = {}
    for argument in models:
        name, equals, model = argument.partition("=")
        if not equals:
            name, model = argument.rstrip("/").rsplit("/", 1)[-1], argument
        export = Path(model) / "export"
        of_run = local and (export / "config.json").is_file()
        new_models = {name: str(export) if of_run else model}
        if of_run and (export / "anchor" / "config.json").is_file():
            new_models[f"{name}-anchor"] = str(export / "anchor")
        for model_name, path in new_models.items():
            if not _NAME.fullmatch(model_name) or model_name in paths_by_name:
                problem = "is given twice" if model_name in paths_by_name else "is not a valid name"
                hint = "name each model: NAME=MODEL"
                raise InvalidInput(f"{model_name!r} {problem}", field="MODEL", hint=hint)
            if local:
                _require_model(path)
            paths_by_name[model_name] = path
    return paths_by_name


def _require_model(path: str) -> None:
    """Raise NotFound if `path` is no directory, and cannot be a hub id.

    A path that resembles the name of an existing directory is taken for a spelling error, and is
    refused, too.
    """
    directory = Path(path)
    if directory.is_dir():
        return
    siblings = (
        [sibling.name for sibling in directory.parent.glob("*/")]
        if directory.parent.is_dir()
        else []
    )
    similar_names = difflib.get_close_matches(directory.name, siblings, n=1)
    # A hub id has at most one slash.
    if similar_names or path.startswith(("/", "./", "../")) or path.count("/") > 1:
        hint = f"did you mean {directory.parent / similar_names[0]}?" if similar_names else ""
        raise NotFound(f"no such directory: {path}", field="MODEL", hint=hint)


def _parse_tables(reward: str, data: str, sets: Sequence[str]) -> dict[str, Any]:
    from clients.config.file import parse_override

    tables: dict[str, Any] = {
        "reward": {"type": reward},
        "data": {"path": data} if data else {},
        "student": {},
    }
    for override in sets:
        path, value = parse_override(override)
        if path[0] not in tables or len(path) < 2:
            raise InvalidInput(
                f"{'.'.join(path)} is not a key of [data], [reward] or [student]",
                field="--set",
                hint="examples: data.prompt_column=question, reward.pattern='(\\d+)'",
            )
        table = tables
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InvalidInput(f"{part} is not a table", field=f"--set {'.'.join(path)}")
        table[path[-1]] = value
    if file := tables["reward"].get("file"):
        tables["reward"]["file"] = str(Path(str(file)).absolute())
    return {**tables, "data": tables["data"] or None}


def _validate_config(values: Mapping[str, Any]) -> ExamConfig:
    from pydantic import ValidationError

    from clients.config.evaluation import ExamConfig
    from clients.config.problems import describe

    try:
        config = ExamConfig.model_validate(values)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        path, message = next(iter(describe(detail, ExamConfig)))
        field = ".".join(path)
        if path[0] not in ("data", "reward", "student"):
            option = path[-1].removesuffix("_seconds").replace("max_new_", "max_")
            field = "--" + option.replace("_", "-")
        raise InvalidInput(message, field=field) from None
    _check_settings(config)
    return config


def _check_settings(config: ExamConfig) -> None:
    """Raise InvalidInput if settings cannot be combined.

    Raise NotFound if a file does not exist.
    """
    from clients.data.formats import files_of

    kind, generated = config.reward.type, config.reward.task is not None
    if generated and config.data is not None:
        raise InvalidInput(
            f"the reward {kind} generates its own prompts", field="--data", hint="remove the option"
        )
    if not generated and config.data is None:
        hint = "give a file of records, such as a .jsonl file, or a hub data set"
        problem = f"required, because the reward {kind} has no prompts of its own"
        raise InvalidInput(problem, field="--data", hint=hint)
    if config.data is not None:
        for file in files_of(config.data.path, "--data"):
            _require_file(file, "--data")
    if config.reward.file is not None:
        _require_file(config.reward.file, "reward.file")
    if config.student.chat_template is not None:
        _require_file(config.student.chat_template, "student.chat_template")
    if config.endpoint is not None and not config.endpoint.startswith(("http://", "https://")):
        raise InvalidInput("must be like http://HOST:PORT/v1", field="--endpoint")


def _require_file(file: str, field: str) -> None:
    if not Path(file).is_file():
        raise NotFound(f"no such file: {file}", field=field)


def _require_columns(config: ExamConfig) -> None:
    from clients.preflight.columns import with_columns
    from clients.preflight.data_files import check_data_file
    from clients.preflight.files import check_evaluated_template

    config = with_columns(config)
    for prompts in config.data_files:
        check_data_file(prompts)
    for model in config.models.values():
        check_evaluated_template(config, model)


def _config_digest(config: ExamConfig) -> str:
    settings_json = config.model_dump_json(exclude=_IRRELEVANT_TO_ANSWERS)
    return hashlib.sha256(settings_json.encode()).hexdigest()[:12]


def _print_results(reply: tuple[int, str], config: ExamConfig, output: Output) -> ExitCode:
    if reply[0] == ExitCode.INTERRUPTED:
        output.say("stopped; run the same command again to resume")
        return ExitCode.INTERRUPTED
    document = json.loads(parse_reply(reply, "the evaluation"))
    if output.as_json:
        output.result({"out": config.out, "models": document["models"]}, "")
    else:
        output.table("models", document["table"], document["columns"])
    return ExitCode.OK
