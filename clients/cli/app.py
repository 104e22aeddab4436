"""The `distill` command: global options, the list of commands, and error handling."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Annotated

import typer

from clients.cli.commands import (
    cache,
    doctor,
    logs_and_files,
    plan,
    plot,
    preview,
    run,
    submit,
    token,
)
from clients.cli.commands import config as config_commands
from clients.cli.commands import evaluate as exam
from clients.cli.commands import jobs as job_commands
from clients.cli.commands import store as store_commands
from clients.cli.commands import teacher as teacher_commands
from clients.cli.demos import demo, demo_rl
from clients.cli.output import Output
from clients.cli.settings import DEFAULT_SERVER, ClientSettings
from protos.errors import DistillError, ExitCode, InternalFault, InvalidInput
from protos.operating_system import write_utf8
from protos.program.options import VersionOption

EXIT_CODE_MEANINGS = {
    ExitCode.OK: "success, or the job SUCCEEDED",
    ExitCode.JOB_FAILED: "the job FAILED, or the command failed",
    ExitCode.USAGE: "wrong usage, or an invalid job file",
    ExitCode.NOT_FOUND: "no such job, checkpoint, attempt or file",
    ExitCode.UNREACHABLE: "the server or the teacher is unreachable or overloaded",
    ExitCode.JOB_CANCELLED: "the job was CANCELLED",
    ExitCode.WRONG_STATE: "not allowed in the current state",
    ExitCode.TIMED_OUT: "timed out",
    ExitCode.REFUSED: "no valid token, or its role does not allow the action",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C; a submitted job continues",
}
# \b keeps click from rewrapping the lines.
EPILOG = "\b\nExit codes:\n" + "\n".join(
    f"  {code.value:<4} {meaning}" for code, meaning in EXIT_CODE_MEANINGS.items()
)
_FLAGS = ("--json", "-q", "--quiet", "-v", "--verbose", "--no-color")

app = typer.Typer(
    name="distill",
    help="Distil language models: submit jobs, watch them, and download the trained models.",
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("run")(run.run)
app.command("submit")(submit.submit)
app.command("ls")(job_commands.ls)
app.command("table")(job_commands.table)
app.command("tree")(job_commands.tree)
app.command("show")(job_commands.show)
app.command("watch")(submit.watch)
app.command("logs")(logs_and_files.logs)
app.command("cancel")(job_commands.cancel)
app.command("resume")(job_commands.resume)
app.command("rm")(job_commands.rm)
app.command("pin")(job_commands.pin)
app.command("plot")(plot.plot)
app.command("report")(plot.report)
app.command("pull")(logs_and_files.pull)
app.command("capture")(run.capture)
app.command("eval")(exam.exam)
app.add_typer(store_commands.app, name="store")
app.add_typer(config_commands.app, name="config")
app.add_typer(teacher_commands.app, name="teacher")
app.command("pair")(plan.pair)
app.command("plan")(plan.plan)
app.command("preview")(preview.preview)
app.command("cache")(cache.cache)
app.command("doctor")(doctor.doctor)
app.command("token")(token.token)
app.command("demo")(demo.demo)
app.command("demo-rl")(demo_rl.demo_rl)


@app.callback()
def global_options(
    context: typer.Context,
    server: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="DISTILL_SERVER",
            show_envvar=True,
            help="Address of the job server.",
        ),
    ] = DEFAULT_SERVER,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; watch and logs print JSON Lines.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print results only, no progress.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print more details to stderr.")
    ] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Print without colors; $NO_COLOR does the same.")
    ] = False,
    version: VersionOption = False,
) -> None:
    """Create the ClientSettings of all commands from the global options."""
    if not server:
        raise InvalidInput(
            "the address is empty", field="--server", hint="give HOST:PORT, or omit the option"
        )
    color = not (no_color or os.environ.get("NO_COLOR"))
    output = Output(as_json=as_json, quiet=quiet, verbose=verbose, color=color)
    context.obj = ClientSettings(output, server)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, print its errors to stderr, and return its ExitCode.

    `arguments`: the words of the command line; None: those of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    write_utf8()
    # A failed connection is reported here in one sentence; suppress the log lines of gRPC's core.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # The options may not parse, so the format of errors is found by searching for the flags.
    is_plain = "--no-color" in arguments or bool(os.environ.get("NO_COLOR"))
    output = Output(as_json="--json" in arguments, color=not is_plain)
    arguments = move_global_options(arguments)
    try:
        command = typer.main.get_command(app)
        code = command.main(arguments, prog_name="distill", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except DistillError as error:
        output.fail(error)
        return int(error.exit_code)
    except typer.TyperException as error:
        return _report_usage_error(error, output)
    except BrokenPipeError:
        # The reader closed the pipe, as in `distill ls | head`: exit silently with 1, as typer
        # does. Without the redirection Python would report the closed pipe at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.JOB_FAILED)
    except OSError as error:
        # A full disk or missing permissions is not a defect of this program: no traceback.
        file_prefix = f"{error.filename}: " if error.filename else ""
        output.fail(InternalFault(f"{file_prefix}{error.strerror or error}"))
        return int(ExitCode.JOB_FAILED)


def move_global_options(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in a new order: first the global options, then all other arguments.

    A user can therefore write a global option such as --json after the command, too.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    moved_options, others = [], []
    remaining = iter(arguments[:end])
    for argument in remaining:
        if argument == "--server":
            moved_options += [argument, *islice(remaining, 1)]
        elif argument in _FLAGS or argument.startswith("--server="):
            moved_options.append(argument)
        else:
            others.append(argument)
    return [*moved_options, *others, *arguments[end:]]


def _report_usage_error(error: typer.TyperException, output: Output) -> int:
    message = error.format_message().replace("Value error, ", "")  # pydantic's prefix
    context: typer.Context | None = getattr(error, "ctx", None)
    if context is not None and message == context.get_help():
        print(message, file=sys.stderr)
        return int(ExitCode.USAGE)
    path = context.command_path if context is not None else "distill"
    hint = f"see {path} --help"
    output.fail(InvalidInput(message.rstrip(".?"), hint=hint))
    return int(ExitCode.USAGE)
