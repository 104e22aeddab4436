"""`distill preview`: its three forms, of a job whose records are hostile, by real programs."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from clients.cli.app import main
from clients.data.preview import parse_preview
from clients.jobs.plots.report_page import report_page
from clients.jobs.record import record_of_run
from clients.local.program import run_program
from clients.runs.directory import RunDirectory
from protos.errors import ExitCode
from tests.clients.data.test_prompt_format import CHARACTERS, MARKED
from tests.student_trainer import tiny

HOSTILE = '\x1b]0;title\x07\u202e<img src=x onerror="alert(1)"></bdi><script>'


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job of fine-tuning whose only record has the hostile text in an earlier answer."""
    words = tiny.tokenizer(CHARACTERS + HOSTILE)
    words.chat_template = MARKED
    words.save_pretrained(tmp_path / "student")
    model = tiny.model(characters=CHARACTERS + HOSTILE)
    model.config.save_pretrained(tmp_path / "student")
    (tmp_path / "student" / "model.safetensors").touch()
    contents = ["1+1=", HOSTILE, "2+2=", "4"]
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]
    (tmp_path / "data.jsonl").write_text(json.dumps({"m": messages}) + "\n")
    job = tmp_path / "job.toml"
    job.write_text(
        f"student.model = '{tmp_path / 'student'}'\nmethod.type = 'sft'\n"
        f"data = {{ path = '{tmp_path / 'data.jsonl'}', messages_column = 'm' }}\n"
    )
    return job


class Tags(HTMLParser):
    """Collects the names of tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}


def test_no_text_of_a_record_acts(
    job_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file of weights is empty: it is not loaded. Three forms show the reply of one program."""
    replies: list[tuple[int, str]] = []

    def run_once(*arguments: Any, quiet: bool) -> tuple[int, str]:
        replies[:] = replies or [run_program(*arguments, quiet=quiet)]
        return replies[0]

    monkeypatch.setattr("clients.local.preview.run_program", run_once)
    assert main(["preview", str(job_file), "--json"]) == ExitCode.OK
    preview = parse_preview(capsys.readouterr().out)
    (view,) = preview.records[0].views
    learned = [text for run in view.runs if run.kind in ("learned", "end") for text in run.texts]
    assert learned == ["4", "<|end|>"]
    assert main(["preview", str(job_file)]) == ExitCode.OK
    terminal = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in terminal)
    assert "[4][<|end|>]" in terminal
    assert "\\x1b]0;title\\x07\\u202e<img" in terminal.replace("\n", "")
    assert main(["preview", str(job_file), "-o", str(tmp_path / "p.html")]) == ExitCode.OK
    page = (tmp_path / "p.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert not tags.names & {"img", "script", "onerror"}
    assert all(c.isprintable() or c == "\n" for c in page)


def test_a_report_has_the_preview(job_file: Path, tmp_path: Path) -> None:
    from clients.config.file import load_job
    from student_trainer.preview import preview_of

    config = load_job(str(job_file), []).config
    run = RunDirectory.create(tmp_path / "run", config)
    run.preview.write_text(preview_of(config).to_json())  # type: ignore[arg-type]
    run.metrics.write_text('{"attempt": 1, "step": 1, "loss": 1, "length/truncated": 0.25}\n')
    page = report_page(record_of_run(run.path))
    assert "What the job learns from" in page
    assert '<bdi class="token end">&lt;|end|&gt;</bdi>' in page
    assert "25%" in page
    run.preview.write_text("{}")
    assert "What the job learns from" not in report_page(record_of_run(run.path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--set", "data.path=missing.jsonl"], "missing.jsonl"),
        (["--set", "student.model=./missing"], "missing"),
        (["-o", "page.pdf"], "page.pdf is not an HTML file"),
    ],
)
def test_what_cannot_be_shown(
    job_file: Path, changes: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["preview", str(job_file), *changes]) == ExitCode.USAGE
    assert message in capsys.readouterr().err
