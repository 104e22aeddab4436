"""A base student of an instruct teacher: told, or trained in the teacher's chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from clients.data.preview import parse_preview
from tests.end_to_end.forked_teacher import ForkedTeacher
from tests.end_to_end.forked_trainer import finish
from tests.end_to_end.processes import new_run

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

ENDS = "#"


@pytest.fixture
def base_and_instruct(material: Material, tmp_path: Path) -> Material:
    """The student has no chat template; that of the teacher ends answers with another token."""
    from tests.student_trainer.tiny import ALPHABET, Material, model, save, tokenizer

    characters = ALPHABET + "UA" + ENDS
    paths = {}
    for name, template in (
        ("student", None),
        (
            "teacher",
            "{% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }}{{ m.content }}"
            f"{ENDS}" + "{% endfor %}{% if add_generation_prompt %}A{% endif %}",
        ),
    ):
        words = tokenizer(characters)
        words.add_special_tokens({"extra_special_tokens": [ENDS]})
        words.chat_template = template
        paths[name] = save(model(seed=2, characters=characters), words, tmp_path / name)
    return Material(material.prompts, paths["teacher"], paths["student"])


def test_the_teachers_template_is_used_and_exported(
    base_and_instruct: Material, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    from student_trainer.preview import preview_with_teachers
    from tests.student_trainer.tiny import job

    teacher = ForkedTeacher(
        ["--model", str(base_and_instruct.teacher), "--no-cache"], log=tmp_path / "teacher.log"
    )
    try:
        runs, previews = {}, {}
        for template in (None, "teacher"):
            changes = {} if template is None else {"student__chat_template": template}
            config = job(base_and_instruct, teacher.address, max_steps=1, **changes)
            previews[template] = preview_with_teachers(config)
            runs[template] = finish(new_run(tmp_path / f"run-{template}", config))
    finally:
        teacher.close()
    warning = "the student has no chat template, but the teacher has one; set student.chat_template"
    assert warning in runs[None].log_file(1).read_text()
    assert warning not in runs["teacher"].log_file(1).read_text()
    for template, preview in previews.items():  # it tells the same before the job starts
        in_run = parse_preview(runs[template].preview.read_text())
        assert preview.warnings == in_run.warnings
        assert preview.records == in_run.records
    assert previews[None].warnings[0].startswith(warning)
    exported = AutoTokenizer.from_pretrained(runs["teacher"].export)
    teacher_words = AutoTokenizer.from_pretrained(base_and_instruct.teacher)
    assert exported.chat_template == teacher_words.chat_template
    end = teacher_words.convert_tokens_to_ids(ENDS)
    ends = GenerationConfig.from_pretrained(runs["teacher"].export).eos_token_id
    assert end in ends
    for name, form in ((None, ("", "")), ("teacher", ("U", f"{ENDS}A"))):
        samples = (runs[name].samples / "step-000001.jsonl").read_text().splitlines()
        prompts = [json.loads(line)["prompt"] for line in samples]
        assert prompts
        assert all(prompt.startswith(form[0]) for prompt in prompts)
        assert all(prompt.endswith(form[1] or "=") for prompt in prompts)


def test_a_job_without_a_teacher_has_no_template_of_one(material: Material) -> None:
    from tests.student_trainer.tiny import sft_job

    with pytest.raises(ValidationError, match=r"(?s)student.chat_template.*the job has no teacher"):
        sft_job(material, student__chat_template="teacher")
