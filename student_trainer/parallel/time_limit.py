"""The time limit of a collective: how long the processes of a job wait for the slowest one.

A process that dies is noticed at once; the limit is for a process that hangs. It must be longer
than everything that one process may do while the others already wait:

    limit = 600 s                        start, load of a busy machine
          + teacher.patience_seconds     no answer of the teacher
          + 4 * environment.max_turns * environment.timeout_seconds
                                         no answer of the retriever, asked up to four times
          + rollouts.patience_seconds    no answer of the rollout engine
          + 24 B * weights / 50 MB/s     reading, verifying and writing a checkpoint
          + tokens / 50 per second       sampling all tokens of this process's answers
          + rewards                      this process's answers, one after the other, each scored
                                         for as long as `reward.timeout_seconds` allows
"""

from __future__ import annotations

from datetime import timedelta

from clients.config.kinds import AnyTraining

_START_SECONDS = 600.0
_BYTES_PER_WEIGHT = 24  # float32: the model, AdamW's moments and an anchor, some of them read twice
_BYTES_PER_SECOND = 50e6
_TOKENS_PER_SECOND = 50.0


def time_limit(config: AnyTraining, weights: int) -> timedelta:
    """Return the time limit of the job's collectives. `weights`: parameters of the student."""
    answers = max(config.sequences_per_step, config.answers_per_evaluation) / config.processes
    seconds = _START_SECONDS + _BYTES_PER_WEIGHT * weights / _BYTES_PER_SECOND
    seconds += answers * config.method.max_new_tokens / _TOKENS_PER_SECOND
    if config.search is not None:
        seconds += 4 * config.search.max_turns * config.search.timeout_seconds
    if config.teacher_link is not None:
        seconds += config.teacher_link.patience_seconds
    if config.rollout_engine is not None:
        seconds += config.rollout_engine.patience_seconds
    if config.reward_table is not None:
        seconds += answers * config.reward_table.timeout_seconds
    return timedelta(seconds=seconds)
