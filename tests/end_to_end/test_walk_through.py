"""The walk-throughs of the documents: every command runs, every line of output is as documented.

Ids, numbers and addresses differ from run to run; all else of an answer must be the same. The
models are those of the tests. The job of docs/getting-started.md is long enough to be still there
when it is cancelled, those of docs/your-data.md are short.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from clients.jobs.client import DistillClient
from clients.jobs.record import record_of_run
from tests.documents import Block, blocks
from tests.end_to_end.processes import ENVIRONMENT, MakeServer, RealServer

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

SERVERS, *SHOWN = blocks("docs/getting-started.md", "walk-through")
CHAT_BLOCKS = blocks("docs/your-data.md", "walk-through")
CONVERSATIONS, CHAT_JOB, CHAT_SERVER, *CHAT, TAUGHT_JOB, OWN_MODEL = CHAT_BLOCKS
STEPS_AFTER_RESUME = 20
MAX_STEPS = r"(?m)^max_steps = \d+$"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Typed:
    """A command and its documented output lines; "..." stands for any lines."""

    command: str
    answer: list[str]


def typed_commands(block: str) -> Iterator[Typed]:
    for text in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, *answer = text.splitlines()
        yield Typed(command, answer)


def normalize_line(line: str) -> str:
    """Return the line without what may differ: numbers, ids, paths, texts, the dots of curves."""
    line = re.sub(r"^([-\d.e ]*\|).*", r"\1", line)
    line = re.sub(r"(on-policy|sft)-[a-z]+-[0-9a-f]+", "ID", line)
    # The progress at this moment is arbitrary.
    line = re.sub(r"RUNNING \w+ .*eval/.*", "RUNNING MEASURED", line)
    # An answer may be empty after few steps, but must not repeat the prompt of CHAT_TEMPLATE.
    line = re.sub(r'"(id|content|finish_reason)":"(?!user: )(?:\\.|[^"\\])*"', r'"\1":TEXT', line)
    line = re.sub(r"(RUNNING|CANCELLING) [a-z]\w*", r"\1 PHASE", line)
    line = re.sub(r"taken by [^;]+", "taken by LISTENER", line)
    line = re.sub(r"/\S+/", "/", line)
    line = re.sub(r"(localhost|127[.0-9]+):\d+", "ADDRESS", line)
    return " ".join(re.sub(r"\d[-+:.e\d]*", "N", line).split())


class Terminal:
    """Runs commands in a directory like a clone, against the servers of the test.

    A context manager, which ends the commands that run in the background.
    """

    def __init__(self, directory: Path, server: RealServer, teacher: str = "") -> None:
        self._place = directory
        self._server = server
        self._teacher = teacher
        self._http_port = find_free_port()
        self._background: list[subprocess.Popen[bytes]] = []
        self._code = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._background:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()

    def localize(self, text: str) -> str:
        server_options = f"--host {self._server.host} --port {self._server.port}"
        for documented, actual in {
            "--port 50051": server_options,
            "localhost:50052": self._teacher,
            "localhost:50050": "127.0.0.1:1",
            "--port 8000": f"--port {self._http_port}",
            "localhost:8000": f"localhost:{self._http_port}",
        }.items():
            text = text.replace(documented, actual)
        return text

    def type(self, command: str, stop_at: str = "") -> list[str]:
        """Run the command and return its output lines; press Ctrl-C after the line `stop_at`."""
        if command == "echo $?":
            return [str(self._code)]
        if command.endswith(" &"):
            self._start_in_background(command.removesuffix(" &"))
            return []
        if command == "distill resume @last":
            command += f" --set max_steps={self._steps_done() + STEPS_AFTER_RESUME}"
        process = subprocess.Popen(
            ["bash", "-c", f"exec {self.localize(command)}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._place,
            env=self._environment(),
            # Background jobs of a shell ignore Ctrl-C, and their child processes inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        lines = []
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.append(line.rstrip("\n"))
                if stop_at and normalize_line(lines[-1]) == stop_at:
                    process.send_signal(signal.SIGINT)
                    lines.append("^C")
        self._code = process.wait(60)
        return lines

    def _start_in_background(self, command: str) -> None:
        # Warnings of another project's server are not errors of this project.
        environment = self._environment() | {"PYTHONWARNINGS": "default"}
        with (self._place / "background.log").open("ab") as log:
            script = f"exec {self.localize(command)}"
            self._background.append(
                subprocess.Popen(
                    ["bash", "-c", script],
                    stdout=log,
                    stderr=log,
                    cwd=self._place,
                    env=environment,
                )
            )

    def _environment(self) -> dict[str, str]:
        return {
            **ENVIRONMENT,
            "PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}",
            "DISTILL_SERVER": self._server.address,
            "COLUMNS": "80",
        }

    def _steps_done(self) -> int:
        with DistillClient(self._server.address) as client:
            return client.get("@last").step


def assert_same(answer: list[str], documented: list[str], command: str) -> None:
    """A line "..." of `documented` matches any lines, as do lines until a Ctrl-C takes effect."""
    remaining_lines = [normalize_line(line) for line in answer]
    expected_lines = [normalize_line(line) for line in documented]
    expected_text = "\n".join(expected_lines).replace("^C", "^C\n...")
    for number, section in enumerate(re.split(r"\n\.\.\.(?:\n|$)", expected_text)):
        lines = section.split("\n") if section else []
        positions = (
            n
            for n in range(len(remaining_lines) + 1)
            if remaining_lines[n : n + len(lines)] == lines
        )
        position = next(positions, None)
        assert position is not None, (command, "\n".join(answer), lines)
        assert position == 0 or number > 0, (command, answer)
        remaining_lines = remaining_lines[position + len(lines) :]
    assert remaining_lines == [] or expected_lines[-1:] == ["..."], (command, remaining_lines)


@pytest.mark.slow
def test_everything_typed_is_answered_as_shown(
    material: Material, teacher: str, make_server: MakeServer, tmp_path: Path
) -> None:
    directory = make_clone(tmp_path, material)
    server = make_server()
    with Terminal(directory, server, teacher) as terminal:
        assert type_all(SHOWN, terminal, directory, steps=100000) > 12
    (run,) = server.runs.glob("on-policy-addition-*")
    record = record_of_run(run)
    assert [point.step for point in record.points] == list(range(record.job.max_steps + 1))
    page = (directory / f"{run.name}.html").read_text()
    for word in ("SUCCEEDED", "<svg", "waiting for the teacher", "torch"):
        assert word in page
    assert not any(directory.glob("runs/on-policy-*")), "refused runs leave nothing"


@pytest.mark.slow
def test_a_chat_data_set_becomes_a_served_student(make_server: MakeServer, tmp_path: Path) -> None:
    """`test_the_servers_start_as_shown` runs the command that starts the job server."""
    assert CHAT_SERVER.commands == SERVERS.commands[1:]
    directory = make_chat_directory(tmp_path)
    server = make_server()
    with Terminal(directory, server) as terminal:
        assert type_all([CHAT_JOB, *CHAT], terminal, directory, steps=5) == 7
    (run,) = server.runs.glob("sft-chat-*")
    assert record_of_run(run).job.max_steps == 5


@pytest.mark.slow
def test_the_same_data_set_with_a_teacher(make_server: MakeServer, tmp_path: Path) -> None:
    directory = make_chat_directory(tmp_path)
    server = make_server()
    with Terminal(directory, server) as terminal:
        assert type_all([TAUGHT_JOB], terminal, directory, steps=5) == 0
        terminal.type("distill submit taught.toml")
        last_line = terminal.type("distill -q watch @last")[-1]
    assert re.match(r"on-policy-taught-\w+ SUCCEEDED  5/5 steps  eval/kl", last_line)


@pytest.mark.slow
def test_a_model_without_a_hub(tmp_path: Path) -> None:
    """With fewer steps: the commands write a model with the chat template."""
    from transformers import AutoTokenizer

    (tmp_path / "chats.jsonl").write_text(CONVERSATIONS.body)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    script = OWN_MODEL.body.replace("--steps 150", "--steps 2")
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, env=ENVIRONMENT, check=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / "small")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "user\nHi<|end|>assistant\n"


def type_all(
    documented_blocks: list[Block], terminal: Terminal, directory: Path, *, steps: int
) -> int:
    """Run the blocks in order, with a job of `steps` steps; return the number of commands."""
    count = 0
    for block in documented_blocks:
        if block.kind == "toml":
            name = block.body.splitlines()[0].removeprefix("# ")
            assert len(re.findall(MAX_STEPS, block.body)) == 1
            text = terminal.localize(block.body)
            (directory / name).write_text(re.sub(MAX_STEPS, f"max_steps = {steps}", text))
        elif block.kind == "python":
            run_python(block.body, directory)
        for line in typed_commands(block.body) if block.kind == "console" else ():
            interrupt_line = line.answer.index("^C") if "^C" in line.answer else 0
            stop_at = normalize_line(line.answer[interrupt_line - 1]) if interrupt_line else ""
            assert_same(terminal.type(line.command, stop_at), line.answer, line.command)
            count += 1
    return count


def make_clone(root: Path, material: Material) -> Path:
    """Make a directory with the files of a checkout after `make demo` that the page uses."""
    demo = root / "clone" / "runs" / "demo"
    demo.mkdir(parents=True)
    for name, model_directory in (("teacher", material.teacher), ("student", material.student)):
        (demo / name).symlink_to(model_directory)
    (demo / "data").symlink_to(material.prompts.parent)
    (root / "clone" / ".venv").symlink_to(Path(sys.executable).parents[1])
    return root / "clone"


def make_chat_directory(root: Path) -> Path:
    """Make a directory with two random chat models and 100 conversations, as the page has them."""
    from tests.student_trainer import tiny

    shown = CONVERSATIONS.body.splitlines()
    messages = [json.loads(line)["messages"] for line in shown]
    sums = [
        [
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": str(number + 1)},
        ]
        for number in range(100 - len(messages))
    ]
    (root / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": conversation}) + "\n" for conversation in messages + sums)
    )
    characters = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer = tiny.tokenizer(characters)
    tokenizer.chat_template = CHAT_TEMPLATE
    for seed, name in enumerate(("SmolLM2-135M-Instruct", "SmolLM2-1.7B-Instruct")):
        model = tiny.model(seed=seed, spread=0.1, characters=characters)
        tiny.save(model, tokenizer, root / "models" / name)
    return root


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["teacher", "server"]
)
def test_the_servers_start_as_shown(number: int, material: Material, tmp_path: Path) -> None:
    """Start each server on a free port; the third documented line sets PATH."""
    *starts, source = SERVERS.commands
    command = re.sub(r"--port \d+ &$", "--port 0", starts[number])
    assert command.endswith("--port 0")
    program = Path(command.split()[0]).name
    directory = make_clone(tmp_path, material)
    script = f"{source} && type -P {program} >&2 && exec {command}"
    with subprocess.Popen(
        ["bash", "-euc", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**ENVIRONMENT, "HOME": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        assert line.startswith(f"{program.removeprefix('distill-')} listening on 127.0.0.1:")
        assert process.wait(60) == 0


def run_python(code: str, directory: Path) -> None:
    namespace: dict[str, Any] = {}
    code = code.replace('"trained"', repr(str(directory / "trained")))
    exec(code, namespace)
    assert namespace["model"].config.vocab_size == 13


@pytest.mark.parametrize(
    ("answer", "documented", "is_same"),
    [
        (["a 1", "b"], ["a 22.5e-3", "b"], True),
        (["a", "x", "y", "b"], ["a", "...", "b"], True),
        (["a", "x", "y"], ["a", "..."], True),
        (["a", "x", "b"], ["a", "b"], False),
        (["a"], ["a", "b"], False),
        (["x", "a"], ["a"], False),
        (["a", "b"], ["a"], False),
        (["error: no job"], ["error: no jab"], False),
    ],
)
def test_answers_are_compared(answer: list[str], documented: list[str], is_same: bool) -> None:
    if is_same:
        assert_same(answer, documented, "")
    else:
        with pytest.raises(AssertionError):
            assert_same(answer, documented, "")
