"""The keys of every job and of every training job, and the properties that other packages read.

Other packages do not test which method a job has. They read properties of the job, such as the
teacher that it needs. The class of a method overrides the defaults. Properties are not keys of the
job file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import (
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from clients.config.tables.after import After, check_outputs
from clients.config.tables.common import (
    CheckpointConfig,
    EvalConfig,
    EvaluatedModel,
    ExportConfig,
    ResourcesConfig,
    StudentConfig,
    Table,
    TrackConfig,
    TrainConfig,
    refusal,
)
from clients.config.tables.data import DataConfig, DataFile
from clients.config.tables.environment import SearchConfig
from clients.config.tables.reward import RewardConfig
from clients.config.tables.rollouts import RolloutsConfig
from clients.config.tables.teacher import RowRequest, TeacherLink
from clients.data.object_urls import is_object_url
from clients.data.prompt_format import PromptFormat
from protos.errors import InvalidInput

_NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}"
_MAX_LABELS, _MAX_CHARS = 32, 200


def _parse_labels(value: Any) -> dict[str, str]:
    """Return the labels. A value must be text, because the number 1.10 would become 1.1."""
    if not isinstance(value, dict):
        raise ValueError("must be a table of names and texts")
    if len(value) > _MAX_LABELS:
        raise ValueError(f"must have at most {_MAX_LABELS} labels")
    for name, text in value.items():
        if not re.fullmatch(_NAME, name):
            raise ValueError(
                f"{name!r} is not a valid label name: use up to 63 of A-Z a-z 0-9 . _ / -"
            )
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_CHARS:
            raise ValueError(
                f"label {name!r} must be a text of 1 to {_MAX_CHARS} characters, in quotes"
            )
    return dict(value)


Labels = Annotated[
    dict[str, str],
    PlainValidator(_parse_labels),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]


# (extra of the package, the feature that needs the extra, the key that selects the feature)
Extra: TypeAlias = tuple[str, str, str]


class JobConfig(Table):
    """The keys that all jobs have, and the properties by which other modules distinguish jobs.

    Subclasses add the keys of a method and override properties.
    """

    # The module that runs an attempt; `clients/runs/launch.py` describes its protocol.
    program: ClassVar[str] = "student_trainer"
    # The module that prints a preview of the learned tokens; "": the job learns nothing.
    preview_program: ClassVar[str] = "student_trainer.preview"
    name: Annotated[str, Field(min_length=1, max_length=200)] = "distill"
    """Display name; the job id is derived from it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of all random numbers. On one CPU, equal seeds and rows give equal weights."""
    resources: ResourcesConfig = ResourcesConfig()
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Priority in a server's queue: higher first, then in order of submission."""
    after: After = ()
    """Names or ids of jobs that must succeed before a server starts this job."""
    labels: Labels = {}  # noqa: RUF012 (pydantic copies it)
    """Names and values for finding and grouping jobs: `distill ls --label NAME=VALUE`."""

    @model_validator(mode="after")
    def _reads_outputs(self) -> Self:
        check_outputs(self)
        return self

    @property
    def extras(self) -> Sequence[Extra]:
        """The extras (optional dependencies of the package) that the job's program needs."""
        return ()

    @property
    def processes(self) -> int:
        """Number of processes of the job's program."""
        return 1

    @property
    def gpus(self) -> int:
        """Number of GPUs of the job: one per process, plus the GPUs of its rollout engines."""
        return self.processes + self.engine_gpus

    @property
    def trained_student(self) -> StudentConfig | None:
        """The model that the job trains, or None."""
        return None

    @property
    def answering_student(self) -> StudentConfig | EvaluatedModel | None:
        """The model that the job trains or evaluates; None if the job does neither."""
        return self.trained_student

    @property
    def teacher_link(self) -> TeacherLink | None:
        """The table `teacher`, or None."""
        teacher: TeacherLink | None = getattr(self, "teacher", None)
        return teacher

    @property
    def started_teacher(self) -> TeacherLink | None:
        """The teacher that the server or `distill run` starts for the job, or None."""
        teacher = self.teacher_link
        return None if teacher is None or teacher.model is None else teacher

    @property
    def teacher_addresses(self) -> Mapping[str, str | list[str]]:
        """The addresses of the teachers by name. A single teacher has the name ""."""
        return {} if self.teacher_link is None else {"": self.teacher_link.address}

    @property
    def row_request(self) -> RowRequest | None:
        """The rows that the job requests for the student's rollouts, or None."""
        return None

    @property
    def other_tokenizer(self) -> bool:
        """Whether the teacher may have another tokenizer than the student."""
        return getattr(self.teacher_link, "tokenizer", "same") != "same"

    @property
    def teacher_context(self) -> str:
        """Text before the prompt that only the teacher of the student's rollouts reads; "" means
        none.
        """
        return ""

    @property
    def has_other_teacher_prompt(self) -> bool:
        """Whether a teacher with the student's tokenizer reads another prompt than the student."""
        arguments = getattr(self.teacher_link, "template_arguments", None)
        return bool(self.teacher_context) or arguments is not None

    @property
    def anchor_context(self) -> str | None:
        """Text before the prompt that only the anchor reads, or None."""
        return None

    @property
    def rollout_engine(self) -> RolloutsConfig | None:
        """The table `rollouts` if another program than the trainer samples, otherwise None."""
        rollouts: RolloutsConfig | None = getattr(self, "rollouts", None)
        return None if rollouts is None or rollouts.in_trainer else rollouts

    @property
    def engine_gpus(self) -> int:
        """Number of GPUs of the rollout engines, in addition to the GPUs of the trainer."""
        return 0 if self.rollout_engine is None else self.rollout_engine.gpus

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens of a trained or sampled sequence; 0 means no limit."""
        return 0

    @property
    def reward_table(self) -> RewardConfig | None:
        """The table `reward`, or None."""
        reward: RewardConfig | None = getattr(self, "reward", None)
        return reward

    @property
    def search(self) -> SearchConfig | None:
        """The table `environment`, or None. With this table, an answer has several turns."""
        environment: SearchConfig | None = getattr(self, "environment", None)
        return environment

    @property
    def prompt_format(self) -> PromptFormat | None:
        """The format of the prompts; None if the job reads no prompts."""
        data = getattr(self, "data", None)
        prompt_format: PromptFormat | None = data and data.prompt_format
        return prompt_format

    @property
    def learns_all_turns(self) -> bool:
        """Whether every assistant message is trained, not only the last."""
        return False

    @property
    def copies_records(self) -> bool:
        """Whether the job reads its records from a copy. The first job with these data makes the
        copy.
        """
        return True

    @property
    def reads_all_columns(self) -> bool:
        """Whether the job reads all columns of its records, or only columns that its keys name."""
        return False

    @property
    def data_files(self) -> Sequence[DataFile]:
        """The data files and hub data sets that the job's program reads."""
        return ()

    @property
    def stores(self) -> Mapping[str, str]:
        """The directories or URLs of the stores that the job reads, by key."""
        return {}

    @property
    def has_remote_store(self) -> bool:
        """Whether the job reads a store in object storage.

        Only the job's program has the credentials for object storage.
        """
        return any(map(is_object_url, self.stores.values()))

    @property
    def answers_stored_prompts(self) -> bool:
        """Whether the student answers prompts of a store that the job reads."""
        return False

    @property
    def output_store(self) -> str | None:
        """The directory or URL to which the job writes rows, if the job file names one."""
        store: str | None = getattr(getattr(self, "method", None), "store", None)
        return store

    def outputs(self, run: Path) -> Mapping[str, str | Path]:
        """Return the path or URL of each output of the job by name, such as `store` for a capture.

        The files of a training job are not included. `run`: the run directory.
        """
        return {}


class TrainingJob(JobConfig):
    """The keys of every training method, and the properties of every training job."""

    # Whether the student samples every sequence that it learns.
    samples: ClassVar[bool] = False
    # Whether a gradient of zero is an update: rewards may be equal.
    learns_from_zero: ClassVar[bool] = False
    student: StudentConfig
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the training data, such as 2.0, instead of `max_steps`; see docs/jobs.md."""
    max_steps: Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"minimum": 1})] = 500
    """Optimizer steps."""
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    track: TrackConfig = TrackConfig()

    @field_validator("max_steps")
    @classmethod
    def _is_the_only_length(cls, max_steps: int, info: ValidationInfo) -> int:
        if "epochs" in info.data and (info.data["epochs"] is None) == (max_steps == 0):
            raise ValueError(
                "epochs gives the number of steps; remove one of the two keys"
                if max_steps
                else "must be greater than or equal to 1"
            )
        return max_steps

    @model_validator(mode="after")
    def _leaves_steps_open(self) -> Self:
        """With `epochs`, set `max_steps` to 0: the number is unknown until the data are read."""
        if self.epochs is not None and "max_steps" not in self.model_fields_set:
            self.__dict__["max_steps"] = 0  # the table is frozen
        return self

    @model_validator(mode="after")
    def _has_teacher_of_template(self) -> Self:
        if self.student.chat_template == "teacher" and not self.teacher_addresses:
            remedy = "the job has no teacher; name a .jinja file, or remove the key"
            raise refusal(self, "student.chat_template", remedy)
        return self

    @model_validator(mode="after")
    def _divides_plain_layers(self) -> Self:
        if self.train.tensor_parallel > 1 and self.student.lora is not None:
            remedy = "cannot divide adapters; remove the key or the table student.lora"
            raise refusal(self, "train.tensor_parallel", remedy)
        if self.train.tensor_parallel > 1 and self.student.compile:
            remedy = "cannot divide compiled layers; remove this key or student.compile"
            raise refusal(self, "train.tensor_parallel", remedy)
        if self.train.context_parallel > 1 and self.student.compile:
            remedy = (
                "cannot divide the tokens of compiled layers; remove this key or student.compile"
            )
            raise refusal(self, "train.context_parallel", remedy)
        return self

    def _check_beside_images(
        self, data: DataConfig | None, method_rules: Iterable[tuple[bool, str]]
    ) -> None:
        """Raise ValidationError if a job with images has an incompatible key.

        `method_rules`: pairs (is compatible with images, key) for the keys of the method.
        """
        if data is None or data.image_column is None:
            return
        rules = [
            *method_rules,
            (self.train.sharding == "none", "train.sharding"),
            (not self.student.compile, "student.compile"),
        ]
        for is_compatible, key in rules:
            if not is_compatible:
                problem = "does not work with data.image_column; remove one of the two keys"
                raise refusal(self, key, problem)

    @property
    def extras(self) -> Sequence[Extra]:
        """The extras (optional dependencies of the package) that training needs."""
        has_8bit = self.train.optimizer == "adamw_8bit"
        optimizers = [("8bit", "the optimizer adamw_8bit", "train.optimizer")] if has_8bit else []
        return [("train", "training", "method.type"), *optimizers]

    @property
    def processes(self) -> int:
        """Number of processes that train."""
        return self.train.processes

    @property
    def trained_student(self) -> StudentConfig:
        """The model that the job trains."""
        return self.student

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluations compare the student's held-out answers with reference answers."""
        return self.eval.metric != "none"

    @property
    def rollouts_per_prompt(self) -> int:
        """Number of sequences per prompt in a step."""
        count: int = getattr(getattr(self, "method", None), "rollouts_per_prompt", 1)
        return count

    def count_steps(self, epoch_size: int) -> int:
        """Return the number of steps of the job.

        `epoch_size`: number of prompts, or of stored sequences, in one epoch. Raises InvalidInput
        if `epochs` gives 2^31 steps or more.
        """
        if self.epochs is None or self.max_steps:
            return self.max_steps
        prompts = Fraction(str(self.epochs)) * epoch_size
        if (steps := math.ceil(prompts / self.train.prompts_per_step)) >= 2**31:
            raise InvalidInput(
                f"{self.epochs:g} epochs are {steps:,} steps",
                field="epochs",
                hint="lower the value",
            )
        return steps

    def describe_epochs(self, epoch_size: int) -> str:
        """Return a text such as "3 epochs of 7,473 records", for a job that sets `epochs`.

        `epoch_size` is the number of records, or of stored sequences, in one epoch.
        """
        kind = "stored sequences" if self.stores else "records"
        return f"{self.epochs:g} epochs of {epoch_size:,} {kind}"

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences in a step, over all processes."""
        return self.train.prompts_per_step * self.rollouts_per_prompt

    @property
    def sequences_per_update(self) -> int:
        """Maximum number of sequences of one process in an update."""
        return math.ceil(self.sequences_per_step / self.processes)

    @property
    def max_processes(self) -> int:
        """Largest number of processes with at least one sequence each in every update and
        evaluation.
        """
        return min(self.sequences_per_step, self.eval.prompts)

    @property
    def answers_per_step(self) -> int:
        """Maximum number of answers that one process samples in a step."""
        return self.sequences_per_update if self.samples else 0

    @property
    def answers_per_evaluation(self) -> int:
        """Number of held-out answers, over all processes."""
        return self.eval.prompts

    @property
    def has_anchor(self) -> bool:
        """Whether the job has an anchor, a second copy of all weights."""
        return False

    @property
    def has_critic(self) -> bool:
        """Whether the job trains a critic."""
        return False

    @property
    def learns_from_head(self) -> bool:
        """Whether the loss has a KL over head ids, the top-k ids of each row."""
        return True
