"""The steps of a job that learns from a store: its rows were captured, no teacher runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from clients.config.common import DataConfig
from clients.config.offline import OfflineJob
from clients.store.dataset import LogitDataset
from student_trainer.data.captured_stores import Stores, without_copies
from student_trainer.data.order import Order, permutation
from student_trainer.data.prompts import Prompt, load_prompts
from student_trainer.data.sequence import TokenSequence
from student_trainer.loop.step import one_update
from student_trainer.methods.method import Method, kl_evaluation, plain_rollouts
from student_trainer.objectives.distillation import DistillationObjective
from student_trainer.parallel.collectives import together
from student_trainer.parallel.sharding import Replicated, Sharded
from student_trainer.teachers.connections import Connection
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.scored_rollouts import ScoredRollouts
from student_trainer.teachers.source import PendingRows, resolved

log = logging.getLogger(__name__)

_STEPS_AHEAD = 2


@dataclass(frozen=True)
class Mixture:
    """How many of a step's sequences, the first ones, the student answers itself."""

    answers: ScoredRollouts
    count: int


@dataclass(frozen=True)
class _Share:
    """This process's part of a step, read."""

    stored: list[PendingRows]
    prompts: list[Prompt]
    numbers: list[int]


class StoredSteps:
    """`per_step` sequences a step, verified and decoded by a thread while earlier ones are learned.

    Two steps ahead and no more are in memory. Which ones a step has is a pure function of the seed.
    """

    def __init__(
        self,
        data: LogitDataset,
        chosen: NDArray[np.int64],
        accelerator: Accelerator,
        *,
        seed: int,
        per_step: int,
        last_step: int,
        mixture: Mixture | None = None,
    ) -> None:
        """`chosen`: the sequences of `data` to learn from; `last_step`: none is read after it."""
        self._data = data
        self._chosen = chosen
        self._accelerator = accelerator
        self._order = Order(len(chosen), seed)
        self._per_step = per_step
        self._last_step = last_step
        self._mixture = mixture
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._reads: dict[int, Future[_Share]] = {}

    def of_step(self, step: int) -> list[PendingRows]:
        """Raises Corrupt, in every process, before anything of the step is learned."""
        for ahead in range(step, min(step + _STEPS_AHEAD, self._last_step) + 1):
            if ahead not in self._reads:
                self._reads[ahead] = self._thread.submit(self._read, ahead)
        share = together(self._accelerator, self._reads.pop(step).result)
        if self._mixture is None:
            return share.stored
        own = self._mixture.answers.gathered_to(share.prompts, share.numbers)
        self._mixture.answers.finish()
        return own + share.stored

    def _read(self, step: int) -> _Share:
        places = self._order.of_step(step, self._per_step)
        world = self._accelerator.num_processes
        mine = range(self._accelerator.process_index, len(places), world)
        written = self._mixture.count if self._mixture else 0
        own = [i for i in mine if i < written]
        return _Share(
            [read(self._data, int(self._chosen[places[i]])) for i in mine if i >= written],
            [prompt_of(self._data, int(self._chosen[places[i]])) for i in own],
            [(step - 1) * len(places) + i for i in own],
        )


def read(data: LogitDataset, index: int) -> PendingRows:
    """Sequence `index` with its rows. Raises Corrupt, naming it and what to do."""
    entry, block = data.decoded(index)
    ids = np.frombuffer(entry.token_ids, "<i4").astype(np.int64)
    return PendingRows(TokenSequence(torch.from_numpy(ids), entry.start), resolved(block))


def prompt_of(data: LogitDataset, index: int) -> Prompt:
    """What stands before the scored tokens of sequence `index`."""
    entry = data.entry(index)
    return Prompt(np.frombuffer(entry.token_ids, "<i4")[: entry.start].astype(np.int32), "")


def offline_method(
    config: OfflineJob,
    stores: Stores,
    examined: list[Prompt],
    teachers: Mapping[str, Connection],
    accelerator: Accelerator,
    student: Replicated | Sharded,
    tokenizer: Any,
) -> Method:
    """Forward KL, over the teacher's top-k as it was stored."""
    store, method = stores.training, config.method
    tail = method.tail or ("bucket+teacher_samples" if store.has_samples else "bucket")
    objective = DistillationObjective("forward", tail, store.temperature, method.cross_entropy)
    log.info("tail %s, temperature %g, top_k %d", tail, store.temperature, store.top_k)
    rollouts = plain_rollouts(config, student, tokenizer, top_k=0, temperature=store.temperature)
    mixture = None
    if config.teacher is not None:
        teacher = RemoteTeacher(
            teachers[""].client,
            top_k=store.top_k,
            temperature=store.temperature,
            f32=config.teacher.logprob_format == "f32",
        )
        answers = ScoredRollouts(student, rollouts, teacher, config.seed)
        count = round(method.on_policy_fraction * config.sequences_per_step)
        mixture = Mixture(answers, min(max(count, 1), config.sequences_per_step))
    chosen, held_out = _split(config, stores)
    steps = StoredSteps(
        store.data,
        chosen,
        accelerator,
        seed=config.seed,
        per_step=config.sequences_per_step,
        last_step=config.max_steps,
        mixture=mixture,
    )
    aside = (stores.held_out or store).data
    mine = held_out[accelerator.process_index :: accelerator.num_processes]

    def read_held_out() -> list[PendingRows]:
        return [read(aside, int(index)) for index in mine]

    evaluation = kl_evaluation(
        config, accelerator, objective, read_held_out, examined, tokenizer, rollouts
    )
    facts = {"store": store.identity}
    return Method(objective, one_update(steps.of_step), evaluation, facts=facts)


def load_examined(config: OfflineJob, tokenizer: Any, longest: int) -> list[Prompt]:
    """The prompts of `eval.metric`, if it is asked for."""
    path = config.data.eval_prompts
    if config.eval.metric == "none" or path is None:
        return []
    data = DataConfig(
        path=path,
        eval_path=path,
        prompt_column=config.data.prompt_column,
        answer_column=config.data.answer_column,
        template=config.data.template,
    )
    _, examined, _ = load_prompts(
        data, tokenizer, held_out=config.eval.prompts, max_tokens=longest, seed=config.seed
    )
    return examined


def _split(config: OfflineJob, stores: Stores) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sequences to learn from and the held-out ones: pure functions of the seed."""
    count = config.eval.prompts
    chosen = permutation(len(stores.training.data), config.seed, -1)
    other = stores.held_out
    if other is None:
        chosen, held_out = chosen[count:], chosen[:count]
    else:
        held_out = permutation(len(other.data), config.seed, -1)[:count]
    return without_copies(stores.training, chosen, other or stores.training, held_out), held_out
