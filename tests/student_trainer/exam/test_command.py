"""The command `distill eval`: output, refusals and exit codes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from clients.cli.app import main
from clients.cli.commands import evaluate
from protos.errors import ExitCode, InvalidInput
from student_trainer.exam.__main__ import run
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN, TALK
from tests.documents import blocks
from tests.student_trainer import tiny
from tests.student_trainer.exam.conftest import Material, exam
from tests.student_trainer.exam.openai_server import OpenAIServer

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_the_readme_s_commands(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    """With other models and fewer answers: a directory and a run, then a server."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student").symlink_to(material.model)
    (tmp_path / "jobs" / "trained").mkdir(parents=True)
    (tmp_path / "jobs" / "trained" / "export").symlink_to(material.model)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "heldout.jsonl").symlink_to(material.prompts)
    prompts = material.prompts.read_text().replace('"prompt"', '"question"')
    (tmp_path / "test.jsonl").write_text(prompts)
    (block,) = blocks("docs/evaluation.md", "eval")
    local_command, served_command = (shlex.split(command)[1:] for command in block.commands)
    size_options = ["--prompts", "4", "--samples", "16", "--max-tokens", "2"]
    assert main(["-q", *local_command, *size_options]) == ExitCode.OK
    shown_lines, printed_lines = block.body.splitlines()[2:4], capfd.readouterr().out.splitlines()
    assert printed_lines[0].split() == shown_lines[0].split()  # the columns
    assert [row.split()[0] for row in printed_lines[1:]] == ["student", "trained"]
    monkeypatch.setenv("NO_PROXY", "*")
    with OpenAIServer(material.model) as server:
        served_command[served_command.index("http://localhost:8000/v1")] = server.endpoint
        assert main(["-q", *served_command, *size_options, "--out", "served"]) == ExitCode.OK
    assert server.paths == {"/v1/chat/completions"}
    assert capfd.readouterr().out.splitlines()[1].startswith("Qwen3-0.6B ")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_two_models_side_by_side(material: Material, tmp_path: Path, capfd: Capture) -> None:
    """A run directory stands for its exported model and its anchor."""
    export = tmp_path / "run" / "export"
    export.mkdir(parents=True)
    for file in material.model.iterdir():
        (export / file.name).symlink_to(file)
    (export / "anchor").symlink_to(material.model)
    arguments = [
        *("eval", str(tmp_path / "run"), "--data", str(material.prompts), "--prompts", "6"),
        *("--samples", "4", "--max-tokens", "2", "--reward", "exact_match"),
        *("--out", str(tmp_path / "out")),
    ]
    assert main(["-q", *arguments]) == ExitCode.OK
    head, *rows = capfd.readouterr().out.splitlines()
    columns = ["MODEL", "PASS@1", "PASS@4", "GAIN", "MAJ@4", "TOKENS", "TRUNCATED", "ERRORS"]
    assert head.split() == columns
    assert [row.split()[0] for row in rows] == ["run", "run-anchor"]
    assert main(["-q", "--json", *arguments]) == ExitCode.OK
    document = json.loads(capfd.readouterr().out)
    first, second = document["models"]
    # The same weights and seeds: the same answers.
    assert {**second, "model": "run"} == {**first, "gain": {"mean": 0.0, "low": 0.0, "high": 0.0}}
    assert json.loads((tmp_path / "out" / "result.json").read_text())["models"] == [first, second]


def test_answers_are_the_seed_s_and_judged_again_without_being_asked_again(
    material: Material, tmp_path: Path
) -> None:
    (row,) = run(exam(material, tmp_path / "one"))
    (smaller_row,) = run(exam(material, tmp_path / "two", prompts=3))
    table = pyarrow.parquet.read_table(tmp_path / "one" / "tiny" / "judged.parquet").to_pylist()
    small_table = pyarrow.parquet.read_table(
        tmp_path / "two" / "tiny" / "judged.parquet"
    ).to_pylist()
    assert (row["prompts"], smaller_row["prompts"], len(table), len(small_table)) == (
        10,
        3,
        240,
        72,
    )
    texts = {(answer["prompt"], answer["sample"]): answer["text"] for answer in table}
    assert all(
        texts[answer["prompt"], answer["sample"]] == answer["text"] for answer in small_table
    )
    assert sum(answer["reward"] for answer in table) / 240 == pytest.approx(row["pass@1"]["mean"])
    time_before = (tmp_path / "one" / "tiny" / "answers.jsonl").stat().st_mtime_ns
    looser = exam(material, tmp_path / "one", reward={"type": "regex", "pattern": "="})
    assert run(looser)[0]["pass@1"]["mean"] > row["pass@1"]["mean"]
    assert (tmp_path / "one" / "tiny" / "answers.jsonl").stat().st_mtime_ns == time_before


def test_greedy(material: Material, tmp_path: Path) -> None:
    (row,) = run(exam(material, tmp_path, temperature=0.0, samples=3, prompts=4))
    assert row["pass@3"] == row["pass@1"]  # all answers to a prompt are equal


def test_prompts_of_a_task(material: Material, tmp_path: Path) -> None:
    reward = {"type": "reasoning_gym:chain_sum", "template": "{prompt}\n"}
    config = exam(material, tmp_path, data=None, reward=reward, prompts=5, samples=2)
    (row,) = run(config)
    assert (row["prompts"], row["samples"], row["errors"]) == (5, 2, 0)


def test_prompts_with_no_room_for_an_answer_are_refused(material: Material, tmp_path: Path) -> None:
    """`0+0=` and two new tokens are six tokens; `10+10=` and two are eight."""
    model = tmp_path / "model"
    shutil.copytree(material.model, model)
    shape = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 7}
    (model / "config.json").write_text(json.dumps(shape))
    short = {"models": {"tiny": str(model)}, "prompts": None, "samples": 2}
    (row,) = run(exam(material, tmp_path / "out", **short))
    assert (row["prompts"], row["refused"], row["errors"]) == (30, 20 * 2, 20 * 2)
    assert 0 < row["pass@2"]["mean"] <= 1 / 3
    with pytest.raises(InvalidInput, match="exceed the 7 tokens that the model can read") as caught:
        run(exam(material, tmp_path / "long", **short, max_new_tokens=4))
    assert caught.value.field == "--max-tokens"
    assert re.fullmatch(r"set the value to at most [123]", caught.value.hint)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["m", "--reward", "maths", "--data", "x.jsonl"], ExitCode.USAGE, "reward.type: must be"),
        (
            ["m", "--reward", "math"],
            ExitCode.USAGE,
            "--data: required, because the reward math has no prompts of its own; give a file",
        ),
        (
            ["m", "--reward", "reasoning_gym:chain_sum", "--data", "x.jsonl"],
            ExitCode.USAGE,
            "--data: the reward reasoning_gym:chain_sum generates its own prompts; remove the"
            " option",
        ),
        (
            ["m", "--reward", "math", "--data", "x.jsonl"],
            ExitCode.NOT_FOUND,
            "--data: no such file: x.jsonl",
        ),
        (
            ["./m", "--reward", "math", "--data", "DATA"],
            ExitCode.NOT_FOUND,
            "MODEL: no such directory: ./m",
        ),
        (
            ["a/m", "b/m", "--reward", "math", "--data", "DATA"],
            ExitCode.USAGE,
            "MODEL: 'm' is given twice; name each model: NAME=MODEL",
        ),
        (["m", "--reward", "math", "--data", "DATA", "--samples", "0"], 2, "--samples: must be"),
        (["m", "--reward", "math", "--data", "DATA", "--top-p", "0"], 2, "--top-p: must be"),
        (
            ["m", "--reward", "math", "--data", "DATA", "--endpoint", "localhost:8000"],
            ExitCode.USAGE,
            "--endpoint: must be like http://HOST:PORT/v1",
        ),
        (
            ["m", "--reward", "math", "--data", "DATA", "--set", "seed=3"],
            ExitCode.USAGE,
            "--set: seed is not a key of [data], [reward] or [student]",
        ),
        (
            ["m", "--reward", "math", "--data", "DATA", "--set", "student.chat_template=x"],
            ExitCode.USAGE,
            "student.chat_template: must be the path of a .jinja file",
        ),
        (
            ["m", "--reward", "math", "--data", "DATA", "--set", "student.chat_template=x.jinja"],
            ExitCode.NOT_FOUND,
            "student.chat_template: no such file: x.jinja",
        ),
        (
            ["m", "--reward", "math", "--data", "DATA", "--set", "data.prompt_colum=x"],
            ExitCode.USAGE,
            "data.prompt_colum: unknown key; did you mean 'prompt_column'?",
        ),
        (
            ["m", "--reward", "python", "--data", "DATA", "--set", "reward.file=none.py"],
            ExitCode.NOT_FOUND,
            "reward.file: no such file: ",
        ),
    ],
)
def test_refusals_are_one_sentence(
    material: Material, capsys: Capture, arguments: list[str], code: int, message: str
) -> None:
    command_line = [
        str(material.prompts) if argument == "DATA" else argument for argument in arguments
    ]
    assert main(["eval", *command_line]) == code
    error_output = capsys.readouterr().err
    assert error_output.startswith(f"error: {message}")
    assert error_output.count("\n") == 1


def test_what_only_the_program_finds_is_told_likewise(tmp_path: Path, capfd: Capture) -> None:
    out = ("--out", str(tmp_path), "--samples", "1")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1", "answer": "1"}\n' * 20 + '{"prompt": "1"}\n')
    command_line = ["-q", "eval", "m=nowhere", "--reward", "exact_match", "--data", str(data)]
    assert main([*command_line, *out]) == ExitCode.USAGE
    error_output = capfd.readouterr().err
    assert error_output.startswith("error: --answer-column: there is no column 'answer' in row 21")


def test_a_column_that_is_not_there_is_told_at_once(material: Material, capfd: Capture) -> None:
    command_line = [
        "-q",
        "eval",
        "m=nowhere",
        "--reward",
        "exact_match",
        "--data",
        str(material.prompts),
    ]
    assert main([*command_line, "--set", "data.answer_column=solution"]) == ExitCode.USAGE
    error_output = capfd.readouterr().err
    assert error_output.startswith("error: data.answer_column: ")
    assert error_output.endswith(
        "has no column 'solution'; the data has the columns prompt, answer; set data.answer_column"
        " to one of these columns\n"
    )


def test_a_missing_template_is_told_before_torch_is_loaded(
    material: Material, tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "run_program", None)
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALK, "answer": "4"}) + "\n")
    arguments = ["-q", "eval", str(material.model), "--reward", "exact_match", "--data", str(path)]
    assert main(arguments) == ExitCode.USAGE
    error_output = capfd.readouterr().err
    assert "has no chat template" in error_output
    assert "chat_template" in error_output


def test_conversations_of_a_local_model(material: Material, tmp_path: Path) -> None:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = PLAIN
    model = tiny.save(
        tiny.model(seed=1, spread=0.07, characters=CHARACTERS), words, tmp_path / "chat"
    )
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"m": TALK, "answer": None}) + "\n" for _ in range(3)))
    data = {"path": str(path), "messages_column": "m"}
    changes = {"models": {"chat": str(model)}, "samples": 2, "prompts": 3}
    (row,) = run(exam(material, tmp_path / "out", data=data, **changes))
    assert (row["prompts"], row["samples"], row["errors"]) == (3, 2, 0)
    judged = pyarrow.parquet.read_table(tmp_path / "out" / "chat" / "judged.parquet").to_pylist()
    assert {answer["question"] for answer in judged} == {"2+2="}
    # Answers depend on the system text, and a directory has answers of one setting.
    with pytest.raises(InvalidInput, match="holds answers for system = None, not 9"):
        run(exam(material, tmp_path / "out", data=data | {"system": "9"}, **changes))
    plain_changes = {**changes, "models": {"plain": str(material.model)}}
    with pytest.raises(InvalidInput, match="has no chat template"):
        run(exam(material, tmp_path / "other", data=data, **plain_changes))
    words.chat_template = None
    tiny.save(tiny.model(seed=1, characters=CHARACTERS), words, tmp_path / "base")
    (tmp_path / "chat.jinja").write_text(PLAIN)
    base_changes = {**changes, "models": {"base": str(tmp_path / "base")}}
    student = {"chat_template": str(tmp_path / "chat.jinja")}
    (row,) = run(exam(material, tmp_path / "out", data=data, student=student, **base_changes))
    assert (row["prompts"], row["errors"]) == (3, 0)
    (tmp_path / "chat.jinja").write_text(PLAIN + " ")
    with pytest.raises(InvalidInput, match="holds answers for student_template = "):
        run(exam(material, tmp_path / "out", data=data, student=student, **base_changes))
    path.write_text(json.dumps({"m": TALK[1:2]}) + "\n")
    with pytest.raises(InvalidInput, match=r"^data.messages_column: .* row 1 of .* has no message"):
        run(exam(material, tmp_path / "unasked", data=data, **changes))
