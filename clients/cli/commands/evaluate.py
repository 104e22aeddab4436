"""`distill eval`: models answer prompts many times, here or at a server, and a reward judges."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clients.cli.output import Output
from clients.cli.settings import settings_of
from protos.errors import ExitCode, InternalFault, InvalidInput, NotFound, error_of
from protos.extras import require_extra

if TYPE_CHECKING:
    from clients.config.exam import ExamConfig

# It names a directory, and stands in a table.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
# What of the settings decides no answer: more can be asked of the same directory.
_FREE = {"out", "reward", "prompts", "samples", "in_flight", "patience_seconds"}


ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[NAME=]MODEL...",
        help="Hugging Face directories, run directories (with their anchors), or what the endpoint"
        " calls its models.",
    ),
]
RewardOption = Annotated[str, typer.Option(help="Who judges, as reward.type of a job file.")]
KeysOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of [data] or [reward] of a job file: data.prompt_column=question.",
    ),
]
OutOption = Annotated[
    str, typer.Option(metavar="DIR", help="Where answers are kept, and gone on with.")
]
EndpointOption = Annotated[
    str, typer.Option(metavar="URL", help="http://HOST:PORT/v1; key in $OPENAI_API_KEY.")
]


def exam(
    context: typer.Context,
    models: ModelsArgument,
    reward: RewardOption,
    data: Annotated[str, typer.Option(help="A .jsonl or .parquet file, or a hub data set.")] = "",
    sets: KeysOption = None,
    prompts: Annotated[int, typer.Option(help="So many of them, chosen by the seed; 0: all.")] = 0,
    samples: Annotated[int, typer.Option(help="Answers to each prompt.")] = 32,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Share of the likeliest tokens.")] = 0.9,
    max_tokens: Annotated[int, typer.Option(help="Of one answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the choice of prompts, and the sampling.")] = 0,
    out: OutOption = "",
    endpoint: EndpointOption = "",
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    in_flight: Annotated[int, typer.Option(help="Requests at the same time.")] = 64,
    patience: Annotated[float, typer.Option(help="Seconds for one answer of a server.")] = 600.0,
) -> ExitCode:
    """Measure models: pass@1, pass@k, majority votes and lengths, with 95% intervals over prompts.

    Stopped or killed, the same command goes on: no answer that came is asked for again.
    """
    output = settings_of(context).output
    values = {
        **_tables(reward, data, sets or []),
        "models": _named(models, local=not endpoint),
        "out": out or "?",
        "prompts": prompts or None,
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "seed": seed,
        "endpoint": endpoint or None,
        "api": api,
        "in_flight": in_flight,
        "patience_seconds": patience,
    }
    config = _checked(values)
    if endpoint:
        require_extra("rl", "an evaluation over an endpoint", field="--endpoint")
    else:
        require_extra("train", "the evaluation of a local model", field="MODEL")
    if not out:
        config = config.model_copy(update={"out": f"runs/eval-{_digest(config)}"})
    output.say(f"answers are kept in {config.out}")
    return _concluded(_asked(config, output), config, output)


def _named(models: Sequence[str], *, local: bool) -> dict[str, str]:
    """Models by name; a run directory stands for what it made, and for its anchor."""
    named: dict[str, str] = {}
    for given in models:
        name, equals, model = given.partition("=")
        if not equals:
            name, model = given.rstrip("/").rsplit("/", 1)[-1], given
        made = Path(model) / "export"
        of_run = local and (made / "config.json").is_file()
        found = {name: str(made) if of_run else model}
        if of_run and (made / "anchor" / "config.json").is_file():
            found[f"{name}-anchor"] = str(made / "anchor")
        for one, path in found.items():
            if not _NAME.fullmatch(one) or one in named:
                what = "is there twice" if one in named else "is no name of a directory"
                raise InvalidInput(f"{one!r} {what}", field="MODEL", hint="name each: NAME=MODEL")
            if local and path.startswith(("/", "./", "../")) and not Path(path).is_dir():
                raise NotFound(f"no such directory: {path}", field="MODEL")
            named[one] = path
    return named


def _tables(reward: str, data: str, sets: Sequence[str]) -> dict[str, Any]:
    from clients.config.file import parse_override

    tables: dict[str, Any] = {"reward": {"type": reward}, "data": {"path": data} if data else {}}
    for override in sets:
        path, value = parse_override(override)
        if path[0] not in tables or len(path) < 2:
            raise InvalidInput(
                f"{'.'.join(path)} is no key of [data] or [reward]",
                field="--set",
                hint="like data.prompt_column=question or reward.pattern='(\\d+)'",
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


def _checked(values: Mapping[str, Any]) -> ExamConfig:
    from pydantic import ValidationError

    from clients.config.exam import ExamConfig
    from clients.config.problems import describe

    try:
        config = ExamConfig.model_validate(values)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        path, message = next(iter(describe(detail, ExamConfig)))
        field = ".".join(path) if len(path) > 1 else "--" + path[0].replace("_", "-")
        raise InvalidInput(message, field=field) from None
    _require(config)
    return config


def _require(config: ExamConfig) -> None:
    """What the settings do not know of each other and of this machine."""
    kind, generated = config.reward.type, config.reward.task is not None
    if generated and config.data is not None:
        raise InvalidInput(f"{kind} makes its own prompts", field="--data", hint="leave it out")
    if not generated and config.data is None:
        raise InvalidInput(f"{kind} needs prompts", field="--data", hint="give a file of them")
    if config.data is not None and config.data.path.endswith((".jsonl", ".parquet")):
        _require_file(config.data.path, "--data")
    if config.reward.file is not None:
        _require_file(config.reward.file, "reward.file")
    if config.endpoint is not None and not config.endpoint.startswith(("http://", "https://")):
        raise InvalidInput("must be like http://HOST:PORT/v1", field="--endpoint")


def _require_file(file: str, field: str) -> None:
    if not Path(file).is_file():
        raise NotFound(f"no such file: {file}", field=field)


def _digest(config: ExamConfig) -> str:
    said = config.model_dump_json(exclude=_FREE)
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def _asked(config: ExamConfig, output: Output) -> tuple[int, str]:
    """(exit code, stdout) of the program that does it, which may load torch."""
    program = subprocess.Popen(
        [sys.executable, "-m", "student_trainer.exam"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if output.quiet else None,
        text=True,
    )
    with program:
        try:
            told, _ = program.communicate(config.model_dump_json())
        except KeyboardInterrupt:  # the terminal sent it to the program as well
            program.wait()
            return int(ExitCode.INTERRUPTED), ""
    return program.returncode, told


def _concluded(asked: tuple[int, str], config: ExamConfig, output: Output) -> ExitCode:
    code, told = asked
    if code == ExitCode.INTERRUPTED:
        output.say("stopped; the same command goes on")
        return ExitCode.INTERRUPTED
    try:
        document = json.loads(told)
    except ValueError:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise InternalFault(
            f"the evaluation {how}", hint="the same command goes on with what it has"
        ) from None
    if "error" in document:
        error = document["error"]
        raise error_of(error["code"], error["message"], field=error["field"], hint=error["hint"])
    if output.as_json:
        output.result({"out": config.out, "models": document["models"]}, "")
    else:
        output.table("models", document["table"], document["columns"])
    return ExitCode.OK
