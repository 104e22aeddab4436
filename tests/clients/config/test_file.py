"""Job files: what they mean, and the exact error messages of wrong ones."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.config.file import MAX_BYTES, load_job, localized
from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import LoraConfig
from protos.errors import ExitCode, InvalidInput, NotFound
from tests.documents import blocks

Write = Callable[..., str]
MIX = "[[data.mix]]\npath = 'b.jsonl'\n"
HEAD = '[student]\nmodel = "m"\n[data]\npath = "d"\n'
SFT = HEAD + "[method]\ntype = 'sft'\n"


def error_message_of(name: str, *overrides: str) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_job(name, overrides)
    return str(caught.value)


def test_three_lines_are_a_job(job_file: Write) -> None:
    config = load_job(job_file()).config
    assert config.student.model == "org/model"
    assert config.max_steps == OnPolicyJob.model_fields["max_steps"].default


def test_the_default_tail_and_head_depend_on_the_divergence(job_file: Write) -> None:
    for overrides, tail, k, draws, samples in (
        ((), "bucket+draws", 16, 48, 0),
        (("method.divergence=forward_kl",), "bucket+teacher_samples", 16, 0, 48),
        (("method.tail=bucket",), "bucket", 64, 0, 0),
        (("method.tail=bucket", "teacher.top_k=8"), "bucket", 8, 0, 0),
    ):
        config = load_job(job_file(), overrides).config
        assert isinstance(config, OnPolicyJob)
        assert (config.method.tail_mode, config.top_k) == (tail, k)
        assert (config.draws, config.tail_samples) == (draws, samples)


def test_a_typo_in_the_tail_is_one_problem(job_file: Write) -> None:
    message = error_message_of(job_file(), "method.tail=bucket+drawz")
    assert message.startswith("--set: method.tail: got 'bucket+drawz', expected one of 'none'")
    assert "\n" not in message


def test_toml_and_yaml_mean_the_same(job_file: Write) -> None:
    toml = job_file(HEAD + "[train]\nlearning_rate = 1e-5\n")
    yaml = job_file(
        "student: {model: m}\ndata:\n  path: d\ntrain:\n  learning_rate: 1e-5\n", "job.yaml"
    )
    assert load_job(toml).config == load_job(yaml).config


def test_every_problem_at_once_with_its_line(job_file: Write) -> None:
    name = job_file(
        HEAD + '[teacher]\ntopk = 5\ntop_k = 0\n[method]\ntype = "on-policy"\ndivergence = "kl"\n',
        "a.toml",
    )
    assert error_message_of(name) == (
        "a.toml: 4 problems\n"
        "  a.toml:7: teacher.top_k: must be greater than or equal to 1 (got 0)\n"
        "  a.toml:6: teacher.topk: unknown key; did you mean 'top_k'?\n"
        "  a.toml:9: method.type: got 'on-policy', expected one of"
        " 'on_policy', 'offline', 'rl', 'sft', 'capture', 'eval'\n"
        "  a.toml:10: method.divergence: got 'kl', expected one of 'reverse_kl', 'forward_kl'"
    )


def test_the_same_of_yaml(job_file: Write) -> None:
    name = job_file(
        "student:\n  model: m\ndata:\n  path: d\nteacher:\n  topk: 5\n  top_k: 0\n", "a.yaml"
    )
    assert error_message_of(name) == (
        "a.yaml: 2 problems\n"
        "  a.yaml:7: teacher.top_k: must be greater than or equal to 1 (got 0)\n"
        "  a.yaml:6: teacher.topk: unknown key; did you mean 'top_k'?"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a.toml: 2 problems\n"
             "  a.toml: student.model: missing; Hugging Face directory, its s3:// or gs:// URL,"
             " or hub id\n"
             "  a.toml: data.path: missing; Records: .jsonl, .json, .csv, .parquet, a pattern, an"
             " s3:// or gs:// URL, or a hub id"),
        (HEAD + "max_step = 4",
         "a.toml:5: data.max_step: unknown key; did you mean 'max_steps' at the top of the file?"),
        ("step = 4\n" + HEAD, "a.toml:1: step: unknown key; did you mean 'max_steps'?"),
        ("num_train_epochs = 4\n" + HEAD,
         "a.toml:1: num_train_epochs: unknown key; did you mean 'epochs'?"),
        ("lr = 1\n" + HEAD, "a.toml:1: lr: unknown key; did you mean 'train.learning_rate'?"),
        (HEAD + "[train]\nlr = 1",
         "a.toml:6: train.lr: unknown key; did you mean 'learning_rate'?"),
        (HEAD + "[sftt]\nx = 1", "a.toml:5: sftt: unknown key; did you mean method.type = 'sft'?"),
        ("top_k = 4\n" + HEAD, "a.toml:1: top_k: unknown key; it belongs to [teacher]"),
        (HEAD + "[train]\ntemperature = 2.0",
         "a.toml:6: train.temperature: unknown key; it belongs to [method]"),
        (HEAD + "[train]\nseed = 2",
         "a.toml:6: train.seed: unknown key; it belongs to the top of the file"),
        (HEAD + "[train]\neval = 2",
         "a.toml:6: train.eval: unknown key; it belongs to the top of the file"),
        (HEAD + "[tracker]\nwandb = 2", "a.toml:5: tracker: unknown key; did you mean 'track'?"),
        (HEAD + "[eval]\nzzzz = 2", "a.toml:6: eval.zzzz: unknown key"),
        (HEAD + MIX + "share = 0.5\n" + MIX + "shar = 0.2\n",
         "a.toml: 2 problems\n"
         "  a.toml:8: data.mix.1.share: missing; Share of the prompts of every step;"
         " the remaining prompts come from `data.path`\n"
         "  a.toml:10: data.mix.1.shar: unknown key; did you mean 'share'?"),
        (HEAD + MIX + "share = 1.5\n",
         "a.toml:7: data.mix.0.share: must be less than 1 (got 1.5)"),
        (HEAD + "mix = [{ path = 'b', share = 0.7 }, { path = 'c', share = 0.3 }]",
         "a.toml:5: data.mix: the shares must add up to less than 1; data.path has the rest"),
        (HEAD + MIX + "weight = 0.5\n",
         "a.toml: 2 problems\n"
         "  a.toml:5: data.mix.0.share: missing; Share of the prompts of every step;"
         " the remaining prompts come from `data.path`\n"
         "  a.toml:7: data.mix.0.weight: unknown key; the keys of data.mix.0 are"
         " 'path', 'share', 'name', 'split'"),
        (HEAD + "mix = { path = 'b', share = 0.7 }",
         "a.toml:5: data.mix: must be a valid array of tables, each under [[data.mix]]"
         " (got {'path': 'b', 'share': 0.7})"),
        (HEAD + "template_arguments = { tokenize = true }",
         "a.toml:5: data.template_arguments: 'tokenize' is set by the program; remove the key"),
        (HEAD + "system = ''", "a.toml:5: data.system: must have at least 1 character (got '')"),
        (HEAD + "weight_column = ''",
         "a.toml:5: data.weight_column: must have at least 1 character (got '')"),
        (HEAD + "chat_templat = false",
         "a.toml:5: data.chat_templat: unknown key; did you mean 'chat_template'?"),
        (HEAD + "message_column = 'm'",
         "a.toml:5: data.message_column: unknown key; did you mean 'messages_column'?"),
        (SFT + "max_tokens = 1", "a.toml:7: method.max_tokens: must be greater than or equal to 2"),
        (SFT + "train_on = 'first'",
         "a.toml:7: method.train_on: got 'first', expected one of 'last', 'all'"),
        (SFT + "max_prompt_tokens = 4",
         "a.toml:7: method.max_prompt_tokens: unknown key; only a job with method.type ="
         " 'on_policy' or 'rl' has it"),
        ("max_steps = 1.5\n" + HEAD, "a.toml:1: max_steps: must be a valid integer (got 1.5)"),
        ("max_steps = 0\n" + HEAD,
         "a.toml:1: max_steps: must be greater than or equal to 1 (got 0)"),
        ("epochs = 0\n" + HEAD, "a.toml:1: epochs: must be greater than 0 (got 0)"),
        ("epochs = -1.5\n" + HEAD, "a.toml:1: epochs: must be greater than 0 (got -1.5)"),
        ("epochs = 2\nmax_steps = 500\n" + HEAD,
         "a.toml:2: max_steps: epochs gives the number of steps; remove one of the two keys"),
        ("max_steps = true\n" + HEAD, "a.toml:1: max_steps: must be a valid integer (got true)"),
        ("name = 3\n" + HEAD, "a.toml:1: name: must be a valid string (got 3)"),
        ("teacher = 'x'\n" + HEAD, "a.toml:1: teacher: must be a table (got 'x')"),
        (HEAD + "template_arguments = 'x'\n",
         "data.template_arguments: must be a table (got 'x')"),
        ("train = { learning_rate = inf }\n" + HEAD,
         "a.toml:1: train.learning_rate: must be a finite number (got inf)"),
        ("a = [1,\n" + HEAD, "a.toml:2: not TOML: Invalid value (column 2)"),
        ("a = 1\na = 2\n", "a.toml:2: not TOML: Cannot overwrite a value (column 6)"),
        ("a = " + "[" * 9999, "a.toml: nested too deeply"),
        ("a = " + "9" * 9999, "a.toml: not TOML: Exceeds the limit"),
    ],
)  # fmt: skip
def test_toml_mistakes(job_file: Write, text: str, expected: str) -> None:
    message = error_message_of(job_file(text, "a.toml"))
    assert message == expected or expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n", "a.yaml:1: must be a mapping of keys to values"),
        ("a: 1\na: 2\n", "a.yaml:2: a: given twice"),
        ("a: &x [1]\nb: *x\n", "a.yaml:2: not YAML: aliases are not allowed"),
        ("a: [1,\n", "a.yaml:2: not YAML: "),
        ("a: !!python/name:os.system\n", "a.yaml:1: not YAML: could not determine a constructor"),
        ("seed: 2001-99-99\n", "a.yaml: not YAML: month must be in 1..12"),
        ("? [1, 2]\n: 3\n", "a.yaml:1: a key must be a word without spaces"),
        ("student: x\ndata:\n  path: d\n", "a.yaml:1: student: must be a table (got 'x')"),
    ],
)
def test_yaml_mistakes(job_file: Write, text: str, expected: str) -> None:
    assert error_message_of(job_file(text, "a.yaml")).startswith(expected)


@pytest.mark.parametrize("after", ['after = "{}"', 'student.model = "@{}/export"'])
def test_jobs_that_depend_on_each_other(job_file: Write, after: str) -> None:
    job = '[[job]]\nname = "{}"\n{}\ndata.path = "org/d"\nteacher.address = "h:1"\n{}\n'
    model = 'student.model = "org/m"' if after.startswith("after") else ""
    first, second = (
        job.format("a", model, after.format("b")),
        job.format("b", model, after.format("a")),
    )
    message = error_message_of(job_file(first + second))
    key = after.partition(" ")[0]
    assert re.match(rf"job\.toml:\d: {key}: job 'b' is not above 'a' in the file; write", message)
    itself = job.format("a", 'student.model = "org/m"', 'after = "a"')
    other = job.format("b", 'student.model = "org/m"', "")
    assert "job 'a' is not above 'a'" in error_message_of(job_file(itself + other))
    assert "job 'b' is not above 'a'" in error_message_of(
        job_file(job.format("a", 'student.model = "org/m"', 'after = ["server-job", "b"]') + other)
    )


def test_files_that_cannot_be_read(job_file: Write, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none\.toml: no such file"):
        load_job("none.toml")
    assert (
        error_message_of(job_file("{}", "a.json"))
        == "a.json: a job file ends in .toml, .yaml or .yml"
    )
    (tmp_path / "dir.toml").mkdir()
    assert error_message_of("dir.toml") == "dir.toml: is a directory"
    assert "larger than 64 KiB" in error_message_of(job_file("#" * (MAX_BYTES + 1)))
    (tmp_path / "latin.toml").write_bytes(b"seed = 1\nname = '\xe9'\n")
    assert error_message_of("latin.toml") == "latin.toml:2: not UTF-8 text"


def test_what_a_parser_takes_and_nobody_else(job_file: Write) -> None:
    deep = ".".join(["a"] * 2000)
    assert "nested too deeply" in error_message_of(job_file(f"{deep} = 1\n"))
    assert "nested too deeply" in error_message_of(job_file(), f"{deep}=1")
    assert "thousands of digits" in error_message_of(
        job_file(f"max_steps = 0x{'f' * 4000}\n" + HEAD)
    )


def test_overrides_are_toml_values_or_bare_strings(job_file: Write) -> None:
    overrides = ("max_steps=7", "teacher.address=host:1", "track.tensorboard=false", "name=12",
              "train.learning_rate=3e-4", 'student.model="quoted"', "data.template=a=b",
              "eval={every = 3}", "labels.version=1.10", "labels.commit=12e4567",
              "labels.day=2026-11-24")  # fmt: skip
    config = load_job(job_file(), overrides).config
    assert (config.max_steps, config.teacher.address, config.name) == (7, "host:1", "12")
    assert (config.track.tensorboard, config.train.learning_rate) == (False, 3e-4)
    assert (config.student.model, config.data.template, config.eval.every) == ("quoted", "a=b", 3)
    assert config.labels == {"version": "1.10", "commit": "12e4567", "day": "2026-11-24"}
    assert "label 'version' must be a text of 1 to 200 characters, in quotes" in error_message_of(
        job_file("labels.version = 1.10\n")
    )


def test_overrides_are_named_as_such(job_file: Write) -> None:
    message = error_message_of(
        job_file(), "teacher.top_k=0", "teachr.top_k=1", "seed", "max_steps=2\nseed=3", "seed.x=1"
    )
    assert message == (
        "job.toml: 5 problems\n"
        "  --set: 'seed' is not KEY=VALUE\n"
        "  --set: seed: must be a valid integer (got {'x': 1})\n"
        "  --set: max_steps: must be a valid integer (got '2\\nseed=3')\n"
        "  --set: teacher.top_k: must be greater than or equal to 1 (got 0)\n"
        "  --set: teachr: unknown key; did you mean 'teacher'?"
    )
    assert error_message_of(job_file(), "data.path.x=1") == (
        "--set: data.path.x: 'data.path' is not a table"
    )


def test_sources(job_file: Write) -> None:
    sources = load_job(
        job_file(HEAD + "[eval]\nevery = 3\n"), ("train={warmup_steps = 1}",)
    ).sources
    assert sources["student.model"] == "job.toml:2"
    assert sources["eval.every"] == "job.toml:6"
    assert sources["eval.prompts"] == "default"
    assert sources["train.warmup_steps"] == "--set"
    assert sources["train.learning_rate"] == "default"


def test_a_table_that_is_off_until_it_is_there(job_file: Write) -> None:
    assert load_job(job_file()).config.student.lora is None
    assert load_job(job_file(), ["student.lora={}"]).config.student.lora == LoraConfig()
    loaded_job = load_job(job_file(), ["student.lora.rank=8"])
    assert loaded_job.config.student.lora == LoraConfig(rank=8)
    assert (loaded_job.sources["student.lora.rank"], loaded_job.sources["student.lora.alpha"]) == (
        "--set",
        "default",
    )
    assert "student.lora.rnak: unknown key; did you mean 'rank'?" in error_message_of(
        job_file(), "student.lora.rnak=8"
    )
    assert "student.lora: must be a table (got true)" in error_message_of(
        job_file(), "student.lora=true"
    )


def test_only_files_that_exist_here_become_absolute(job_file: Write, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    overrides = ("data.path=prompts.jsonl", "data.eval_path=none.jsonl")
    config = localized(load_job(job_file(), overrides).config)
    assert config.data.path == str(tmp_path / "prompts.jsonl")
    assert config.data.eval_path == "none.jsonl"
    mix = "[{ path = 'none.jsonl', share = 0.5 }, { path = 'prompts.jsonl', share = 0.2 }]"
    mixed = localized(load_job(job_file(), [f"data.mix={mix}"]).config)
    assert [part.path for part in mixed.data.mix] == ["none.jsonl", config.data.path]
    assert config.student.model == "org/model"


SHIPPED = [
    *(Path(__file__).parents[3] / "deploy" / "jobs").glob("*.toml"),
    *(Path(__file__).parents[3] / "clients").rglob("*.toml"),
    *(Path(__file__).parents[3] / "examples").glob("*.toml"),
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_job_file_is_valid(path: Path) -> None:
    assert load_job(path).config.method.type


def test_the_minimal_file_is_three_lines() -> None:
    minimal = next(path for path in SHIPPED if path.name == "minimal.toml")
    assert len(minimal.read_text().splitlines()) == 3


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.toml")
    with pytest.raises(InvalidInput, match="not a regular file"):
        load_job(tmp_path / "job.toml")


@pytest.mark.parametrize("key", ["name", "student.model", "data.path"])
def test_names_are_not_empty(job_file: Callable[..., str], key: str) -> None:
    with pytest.raises(InvalidInput, match=f"--set: {key}: .*at least 1"):
        load_job(job_file(), [f'{key}=""'])


def test_the_problems_on_the_page_of_job_files(
    job_file: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page shows exactly what the command prints about this file."""
    (block,) = blocks("docs/jobs.md", "config")
    job_file(
        'student.model = "m"\ndata.path = "d"\n\n[teacher]\ntopk = 8\ntop_k = 0\n'
        '[method]\ntype = "on-policy"\ntemprature = 0.7\n'
    )
    (command,) = block.commands
    assert main(command.split()[1:]) == ExitCode.USAGE
    assert block.body == f"$ {command}\n{capsys.readouterr().err}"


@pytest.mark.parametrize(("value", "is_kept"), [("auto", True), ("tokens", False)])
def test_only_a_name_of_a_tokenizer_is_a_directory(
    value: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("auto", "tokens"):
        Path(name).mkdir()
    text = f"student.model = 's'\ndata.path = 'd'\nteacher.tokenizer = '{value}'\n"
    Path("job.toml").write_text(text)
    job = localized(load_job("job.toml").config)
    assert isinstance(job, OnPolicyJob)
    assert job.teacher.tokenizer == (value if is_kept else str(tmp_path / value))


@pytest.mark.parametrize("url", ["S3://bucket/train.jsonl", "https://host/train.jsonl"])
def test_a_url_of_another_kind_is_no_path(job_file: Write, url: str) -> None:
    message = error_message_of(job_file(), f"data.path={url}", "student.model=s3://bucket/student")
    assert message.endswith(f"data.path: a URL must begin with s3:// or gs:// (got '{url}')")
    assert load_job(job_file(), ["data.path=s3://bucket/train.jsonl"])


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://KEY:SECRET@bucket/p", "the URL is not s3://BUCKET/PREFIX; credentials, region and"),
        ("https://KEY:SECRET@host/p", "a URL must begin with s3:// or gs:// (got 'https://...')"),
        ("s4://bucket/p", "a URL must begin with s3:// or gs:// (got 's4://bucket/p')"),
        ("s3://bucket/../p", "a URL must not have a part '.' or '..'"),
        ("s3://bucket/a/.", "a URL must not have a part '.' or '..'"),
    ],
)
def test_a_refused_url_of_copies(job_file: Write, url: str, problem: str) -> None:
    message = error_message_of(job_file(), f"checkpoint.copy_to={url}")
    assert f"checkpoint.copy_to: {problem}" in message
    assert "SECRET" not in message


def test_no_secret_of_a_url_is_shown(job_file: Write) -> None:
    assert "SECRET" not in error_message_of(job_file(), "data.path=https://KEY:SECRET@host/x.jsonl")
