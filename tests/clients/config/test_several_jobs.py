"""A file with several jobs in [[job]] tables: separate jobs, each with its line numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.cli.app import main
from clients.config.file import load_job, load_jobs
from protos.errors import InvalidInput

TOML = """\
[[job]]
name = "rows"
method.type = "capture"
data = { path = "x.jsonl", tokenizer = "tiny" }

[[job]]
name = "student"
[job.student]
model = "tiny"
[job.method]
type = "offline"
[job.data]
path = "@rows/store"
"""
YAML = """\
job:
  - name: rows
    method: {type: capture}
    data: {path: x.jsonl, tokenizer: tiny}
  - name: student
    student:
      model: tiny
    method: {type: offline}
    data: {path: "@rows/store"}
"""


def write_jobs(tmp_path: Path, text: str, name: str = "jobs.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_toml_and_yaml_are_the_same_jobs(tmp_path: Path) -> None:
    files = load_jobs(write_jobs(tmp_path, TOML))
    assert [file.config.name for file in files] == ["rows", "student"]
    assert files[0].text == files[1].text == TOML
    assert files[1].sources["student.model"].endswith(":9")
    yaml_files = load_jobs(write_jobs(tmp_path, YAML, "jobs.yaml"))
    assert [file.config for file in yaml_files] == [file.config for file in files]
    assert yaml_files[1].sources["student.model"].endswith(":7")


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (TOML.replace("model =", "modle ="), [":9: student.modle: unknown key", "student.model"]),
        (TOML.replace('"rows"', "1").replace('"tiny"', "2"), [":2: name: ", ":9: student.model: "]),
        (TOML.replace('"student"', '"rows"'), [":7: name: another job of the file is 'rows'"]),
        ("seed = 1\n" + TOML, [":1: seed: a file with [[job]] tables must have no other keys"]),
        ("[job]\nname = 'x'\n", [":1: job: must be [[job]] tables"]),
        ("job = []\n", [":1: job: must be [[job]] tables"]),
        (TOML.replace("@rows/store", "@rows/export"), [":13: data.path: got '@rows/export'"]),
        (TOML.replace("tiny", "@tiny"), [":9: student.model: got '@tiny', expected '@JOB/export'"]),
        (TOML.replace("x.jsonl", "@x/store"), [":4: data.path: cannot be the output of a job"]),
        (
            TOML.replace("name = ", "after = [3]\nname = "),
            [":2: after: must be the name or"],
        ),
    ],
)
def test_problems_have_their_lines(tmp_path: Path, text: str, problems: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_jobs(write_jobs(tmp_path, text))
    for problem in problems:
        assert problem in str(caught.value)


def test_commands_that_take_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jobs(tmp_path, TOML)
    with pytest.raises(InvalidInput, match=r"has 2 jobs.*distill submit"):
        load_job(path)
    with pytest.raises(InvalidInput, match="has 2 jobs, but --set, --name"):
        load_jobs(path, ["seed=1"])
    assert main(["config", "check", str(path)]) == 0
    assert main(["config", "show", str(path)]) == 0
    assert "rows     data.path" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    single_job_file = write_jobs(
        tmp_path, 'student.model = "tiny"\ndata.path = "x.jsonl"\nafter = "rows"\n', "1.toml"
    )
    assert main(["run", str(single_job_file)]) == 2
    assert "after: only a server can start a job after other jobs" in capsys.readouterr().err
    assert load_job(single_job_file).config.after == ("rows",)
    assert load_job(single_job_file, ["after=a b"]).config.after == ("a b",)
    assert load_job(single_job_file, ['after=["a", "b"]']).config.after == ("a", "b")


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "jobs.md").read_text()
    block = page.partition("## Pipelines")[2].partition("```toml\n")[2].partition("```")[0]
    jobs = load_jobs(write_jobs(tmp_path, block))
    assert [job.config.method.type for job in jobs] == ["capture", "offline", "rl", "eval"]
