"""Chat templates of student and teacher with one tokenizer are compared on probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.config.tables.common import StudentConfig
from clients.data.prompt_format import PromptFormat
from protos.errors import InvalidInput
from student_trainer.checkpoints.export import export_model
from student_trainer.model.loading import load_model, load_tokenizer, local_directory
from student_trainer.run.chat_templates import find_difference, template_warnings
from teacher_service.engines.hf import HfEngine
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN
from tests.student_trainer import tiny

OTHER = PLAIN.replace("U", "Q").replace("{{ m.role[0] | upper }}", "{{ m.role[0] }}")
ONLY_SYSTEM = PLAIN.replace("{% for m", "{% if messages[0].role == 'system' %}9{% endif %}{% for m")
FAILING = "{{ raise_exception('no') }}"
WITH_MESSAGES = PromptFormat(messages_column="messages")


def words_with(template: str | None) -> Any:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = template
    return words


@pytest.mark.parametrize(
    ("own", "teacher", "form", "expected"),
    [
        (PLAIN, PLAIN, WITH_MESSAGES, None),
        (PLAIN, PLAIN + "{# a remark #}", WITH_MESSAGES, None),
        (None, "", PromptFormat(), None),
        (PLAIN, ONLY_SYSTEM, PromptFormat(), None),
        (PLAIN, ONLY_SYSTEM, WITH_MESSAGES, "after '' the student's writes 'SBe brief"),
        (PLAIN, OTHER, PromptFormat(), "after '' the student's writes 'UWhat is"),
        (PLAIN, FAILING, PromptFormat(), "the teacher's 'an error: no'"),
        (None, PLAIN, PromptFormat(), "the student has no chat template, but the teacher has one"),
        (PLAIN, "", PromptFormat(), "the teacher has no chat template, but the student has one"),
    ],
)
def test_the_first_difference(
    own: str | None, teacher: str, form: PromptFormat, expected: str | None
) -> None:
    difference = find_difference(words_with(own), teacher, form, "teacher")
    if expected is None:
        assert difference is None
    else:
        assert difference is not None
        assert expected in difference


def test_a_teacher_without_a_template_gives_none() -> None:
    config = OnPolicyJob.model_validate(
        {
            "student": {"model": "student"},
            "teacher": {"address": "localhost:1"},
            "data": {"path": "d.jsonl"},
        }
    )
    (warning,) = template_warnings(config, words_with(PLAIN), {"teacher": ""})
    assert "choose a teacher that was trained with the template" in warning
    assert "student.chat_template" not in warning
    (warning,) = template_warnings(config, words_with(None), {"teacher": PLAIN})
    assert warning.endswith(
        "set student.chat_template = 'teacher' to write prompts as the teacher reads them"
    )


def test_a_teacher_says_its_template(tmp_path: Path) -> None:
    for number, template in enumerate((PLAIN, None)):
        path = tmp_path / f"{number}"
        tiny.save(tiny.model(characters=CHARACTERS), words_with(template), path)
        engine = HfEngine(str(path), device="cpu", dtype="float32")
        assert engine.info.chat_template == (template or "")


def test_a_file_replaces_the_template_and_is_exported(tmp_path: Path) -> None:
    """The student's own template is in tokenizer_config.json, as older programs wrote it."""
    path = tiny.save(tiny.model(characters=CHARACTERS), words_with(PLAIN), tmp_path / "student")
    file = tmp_path / "other.jinja"
    file.write_text(OTHER)
    student = StudentConfig(model=str(path), chat_template=str(file))
    tokenizer = load_tokenizer(student)
    assert tokenizer.chat_template == OTHER
    export_model(
        tmp_path / "export",
        model=load_model(student),
        tokenizer=tokenizer,
        source=local_directory(student),
    )
    exported = StudentConfig(model=str(tmp_path / "export"))
    assert load_tokenizer(exported).chat_template == OTHER
    missing = StudentConfig(model=str(path), chat_template=str(tmp_path / "missing.jinja"))
    with pytest.raises(InvalidInput, match=r"missing\.jinja") as caught:
        load_tokenizer(missing)
    assert caught.value.field == "student.chat_template"
