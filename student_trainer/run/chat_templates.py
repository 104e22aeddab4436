"""Compares the chat templates of student and teacher, or uses the teacher's template for both.

Models with the same tokenizer may format conversations differently, and a base model has no format.
With different formats, the teacher would score prompts in a format on which it was not trained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from clients.config.kinds import AnyTraining
from clients.data.prompt_format import PromptFormat, default_template
from clients.preflight.teachers import label_of
from clients.store.captured_store import captured_stores
from clients.teacher.info import TeacherInfo
from protos.errors import InvalidInput

log = logging.getLogger(__name__)

_FIELD = "student.chat_template"
_QUESTION = {"role": "user", "content": "What is 17 + 25?"}
_ANSWER = {"role": "assistant", "content": "It is 42."}
_SYSTEM = {"role": "system", "content": "Be brief."}


def choose_chat_template(
    config: AnyTraining, tokenizer: Any, infos: Mapping[str, TeacherInfo]
) -> Sequence[str]:
    """Choose the chat template of the student's tokenizer, and return the warnings about it.

    `infos`: the information about each teacher of the job, by the teacher's name. If
    `student.chat_template` is "teacher", the tokenizer gets the teacher's template, and there is no
    warning. Otherwise the tokenizer keeps its template, and `template_warnings` are logged and
    returned.

    Raises InvalidInput (`student.chat_template`) if the selected teacher has no template, or if the
    teachers have different templates.
    """
    if config.student.chat_template == "teacher":
        tokenizer.chat_template = _template_of_teachers(infos)
        return ()
    templates = {label_of(name): info.chat_template for name, info in infos.items()}
    warnings = template_warnings(config, tokenizer, templates)
    for warning in warnings:
        log.warning("%s", warning)
    return warnings


def template_warnings(
    config: AnyTraining, tokenizer: Any, templates: Mapping[str, str | None]
) -> Sequence[str]:
    """Return a warning for each teacher whose chat template differs from the student's.

    The warning contains the first difference. Also returns a warning if the job trains a student
    without a template on stored conversations.

    `templates`: the chat templates of the teachers that have the student's tokenizer, by label; ""
    for a teacher without a template, None if the template is not known.
    """
    stores = captured_stores(config)
    if stores is not None and stores[0].facts["form"] == "messages" and not tokenizer.chat_template:
        return (
            "the store has conversations, but the student has no chat template, so the exported"
            " model will not answer chat requests; set student.chat_template to the .jinja file"
            " with which the store was captured",
        )
    prompt_format = config.prompt_format
    if config.row_request is None or prompt_format is None or not prompt_format.chat_template:
        return ()
    has_choice = config.student.chat_template != "teacher"
    if config.other_tokenizer or config.has_other_teacher_prompt or not has_choice:
        return ()
    return [
        f"{difference}; "
        + (
            f"set student.chat_template = 'teacher' to write prompts as the {label} reads them"
            if template
            else "choose a teacher that was trained with the template of the student, or set"
            " data.chat_template = false if the prompts are texts"
        )
        for label, template in templates.items()
        if template is not None
        and (difference := find_difference(tokenizer, template, prompt_format, label))
    ]


def find_difference(
    tokenizer: Any, template: str, prompt_format: PromptFormat, label: str
) -> str | None:
    """Return a sentence about the first difference between two chat templates; None if there is
    none.

    `template`: the teacher's template, "" if it has none. It is compared with the student's
    template in `tokenizer`: both render the same probe conversations. The probes contain system
    messages and tools only if the job uses them.
    """
    own_template = default_template(tokenizer.chat_template) or ""
    if own_template == template:
        return None
    if not own_template or not template:
        owner, other = ("student", label) if not own_template else (label, "student")
        return f"the {owner} has no chat template, but the {other} has one"
    for probe in _probes(prompt_format):
        own_text, text = (
            _render(tokenizer, probe, prompt_format, chat_template)
            for chat_template in (own_template, template)
        )
        if own_text != text:
            start = next(
                (i for i, pair in enumerate(zip(own_text, text, strict=False)) if len({*pair}) > 1),
                min(len(own_text), len(text)),
            )
            return (
                f"the chat templates of student and {label} differ: after"
                f" {own_text[max(0, start - 20) : start]!r} the student's writes"
                f" {own_text[start : start + 40]!r}, the {label}'s {text[start : start + 40]!r}"
            )
    return None


def _template_of_teachers(infos: Mapping[str, TeacherInfo]) -> str:
    templates = {info.chat_template for info in infos.values()}
    if len(templates) > 1:
        problem, remedy = "the teachers have different chat templates", "name a .jinja file"
    elif not any(templates):
        problem = "the teacher has no chat template, or does not send its template"
        remedy = "give a .jinja file, or remove the key"
    else:
        return str(templates.pop())
    raise InvalidInput(problem, field=_FIELD, hint=remedy)


def _probes(prompt_format: PromptFormat) -> Sequence[Sequence[Mapping[str, str]]]:
    probes = [[_QUESTION], [_QUESTION, _ANSWER, _QUESTION]]
    if prompt_format.messages_column is not None or prompt_format.system is not None:
        probes += [[_SYSTEM, *probe] for probe in probes]
    return probes


def _render(
    tokenizer: Any,
    probe: Sequence[Mapping[str, str]],
    prompt_format: PromptFormat,
    chat_template: str,
) -> str:
    """Return a probe conversation as the template writes it, up to the start of the next answer.

    If the template raises an error, returns the text of the error.
    """
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(
                probe,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **prompt_format.template_arguments,
            )
        )
    except (TemplateError, ValueError, TypeError) as error:
        return f"an error: {error}"
