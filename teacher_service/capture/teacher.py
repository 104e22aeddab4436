"""Facts about the teacher of a capture, and the loading of its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clients.config.capture import CaptureTeacher
from clients.data.tokens.tokenizer import first_difference, tokens_of
from clients.preflight.vocabulary import common_ids, require_narrowing
from clients.teacher.client import TeacherClient
from clients.teacher.query import MAX_TAIL_SAMPLES, tokenizer_fingerprint
from protos.errors import InvalidInput, WrongState
from teacher_service.engines.base import ScoringEngine, ScoringEngineInfo
from teacher_service.program import ScoringEngineSettings, VllmEngineSettings, make_engine
from teacher_service.serving.self_test import run_self_test


@dataclass(frozen=True)
class TeacherFacts:
    """Identity and limits of a teacher service or an engine.

    - max_length: maximum number of tokens of a sequence.
    - batch_invariant: True if two captures of the same data get bit-identical rows.
    - vocabulary: a function that returns the tokens by id. It is called only if the tokenizers
      differ.
    - takes_vocab_size, only_temperature_one, takes_images: see TeacherInfo.
    """

    name: str
    fingerprint: str
    version: int
    tokenizer_fingerprint: str
    vocab_size: int
    max_top_k: int
    max_length: int
    max_tail_samples: int
    batch_invariant: bool
    takes_vocab_size: bool
    only_temperature_one: bool
    takes_images: bool
    vocabulary: Callable[[], Sequence[str]]

    @classmethod
    def from_service(cls, client: TeacherClient) -> TeacherFacts:
        """Return the facts of a teacher service. Raises Unavailable if it does not respond."""
        info = client.info()
        return cls(
            info.model,
            info.fingerprint,
            info.version,
            info.tokenizer_fingerprint,
            info.vocab_size,
            info.max_top_k,
            info.max_length,
            info.max_tail_samples,
            info.batch_invariant,
            info.takes_vocab_size,
            info.only_temperature_one,
            info.takes_images,
            client.vocabulary,
        )

    @classmethod
    def from_engine(cls, info: ScoringEngineInfo) -> TeacherFacts:
        """Return the facts of an engine that scores for this capture alone."""
        return cls(
            info.model,
            info.fingerprint,
            info.version,
            info.tokenizer_fingerprint,
            info.vocab_size,
            info.vocab_size,
            info.max_length,
            MAX_TAIL_SAMPLES,
            True,  # a capture with its own engine forms the same batches each time
            info.limits.any_vocab_size,
            not info.limits.any_temperature,
            False,  # an engine of the capture itself is given no images
            lambda: info.vocabulary,
        )

    def narrow(self, width: int, tokenizer: Any) -> TeacherFacts:
        """Return the facts of this teacher for a student with `width` logits.

        The rows then cover only the ids that teacher and student have in common. Every id that only
        one of them has must be padding: if it is a token, raises WrongState.
        """
        common_size = common_ids(width, self.vocab_size, "teacher", tokens_of(tokenizer))
        require_narrowing(self, common_size, "teacher", "student.model")
        max_top_k = min(self.max_top_k, common_size)
        return replace(self, vocab_size=common_size, max_top_k=max_top_k)

    def require_same_tokens(self, tokenizer: Any) -> None:
        """Raise WrongState if `tokenizer` differs from the teacher's.

        The message names the first token id with two meanings.
        """
        tokens = tokens_of(tokenizer)
        if tokenizer_fingerprint(tokens) != self.tokenizer_fingerprint:
            raise WrongState(
                first_difference(self.vocabulary(), tokens, "the tokenizer"),
                field="data.tokenizer",
                hint="set the key to the teacher's tokenizer",
            )


def load_engine(teacher: CaptureTeacher) -> ScoringEngine:
    """Load the engine of a capture job, and run the self-test on it.

    Raises InvalidInput, naming a key of the job, if the engine cannot be loaded, and WrongState if
    the self-test fails.
    """
    assert teacher.model is not None
    settings = ScoringEngineSettings(
        name=teacher.engine,
        model=teacher.model,
        dtype=teacher.dtype,
        device=teacher.device,
        batch_invariant=False,
        max_batch_tokens=teacher.max_batch_tokens,
        max_top_k=teacher.top_k,
        vllm=VllmEngineSettings(tensor_parallel_size=teacher.gpus or 1, gpu_memory_share=0.9),
    )
    try:
        engine = make_engine(settings)
    except InvalidInput as error:
        key = error.field.replace("--", "teacher.").replace("-", "_")
        raise InvalidInput(error.message, field=key, hint=error.hint) from error
    run_self_test(engine)
    return engine
