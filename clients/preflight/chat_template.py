"""Checks that the chat template of a local student fits the keys of the prompts."""

from __future__ import annotations

from pathlib import Path

from clients.config.evaluation import EvalJob
from clients.config.kinds import AnyTraining
from clients.config.offline import OfflineJob
from clients.config.sft import SFTJob
from clients.data.prompt_format import check_chat_template, check_generation
from clients.data.tokens.tokenizer import chat_template_in


def check_template(config: AnyTraining | EvalJob) -> None:
    """Raise InvalidInput if the student's tokenizer has no chat template that the job's keys need.

    A hub id, and files that cannot be interpreted, are left to the job's program.
    """
    path = Path(config.student.model)
    if config.data is None or not path.is_dir():
        return
    if isinstance(config, OfflineJob) and config.data.eval_prompts is None:
        return
    try:
        template = chat_template_in(path)
    except (OSError, ValueError):
        return
    check_chat_template(config.data.prompt_format, template)
    if isinstance(config, SFTJob) and config.method.train_on == "all":
        check_generation(template)
