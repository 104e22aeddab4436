"""What a job is: the model of a job file. `config_file.py` reads files into it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from clients.config.common import (
    Address,
    Count,
    DataConfig,
    Name,
    Table,
    TeacherConfig,
    TrainingJob,
)


class OnPolicyConfig(Table):
    """On-policy distillation: the student writes, the teacher scores every token of it."""

    type: Literal["on_policy"] = "on_policy"
    """The method."""
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    """KL(student||teacher) or KL(teacher||student)."""
    tail: Literal["none", "published", "sampled", "bucket", "bucket+sampled"] = "bucket+sampled"
    """What stands for the vocabulary outside the head; the default: unbiased, least variance."""
    rollouts_per_prompt: Count = 1
    """Answers sampled for one prompt."""
    max_prompt_tokens: Count = 512
    """Longer prompts are left out, and counted."""
    max_new_tokens: Count = 256
    """Tokens of one answer."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the sampling, and of student and teacher in the loss."""


class OnPolicyJob(TrainingJob):
    """A job. A three-line file (student.model, teacher.address, data.path) trains."""

    data: DataConfig
    teacher: TeacherConfig = TeacherConfig()
    teachers: dict[Name, Address] = {}  # noqa: RUF012 (pydantic copies it)
    """Addresses of several teachers by name, in place of `teacher.address`."""
    method: OnPolicyConfig = OnPolicyConfig()

    @property
    def teacher_addresses(self) -> dict[str, str | list[str]]:
        """By name; a teacher that is the only one has the name ""."""
        return self.teachers or {"": self.teacher.address}

    @property
    def sequences_per_step(self) -> int:
        """Over all processes."""
        return self.train.prompts_per_step * self.method.rollouts_per_prompt
