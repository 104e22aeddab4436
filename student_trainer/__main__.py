"""Run one attempt of a training job: python -m student_trainer RUN_DIR --attempt N [--from-step S].

Modules are imported in two stages, so that cheap checks run before torch is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from clients.config.kinds import AnyTraining
from clients.config.tables.job import TrainingJob
from clients.preflight.files import check_files, check_here
from clients.preflight.limits import Limits, fit_limits, resumed_limits, write_limits
from clients.preflight.teachers import check_teachers, contexts_of
from clients.runs.directory import RunDirectory, Verdict
from clients.runs.progress import AttemptDied, Progress, prepare, run_to_verdict
from clients.runs.started_services import connected
from clients.store.copies import files_on_disk
from protos.errors import InvalidInput
from student_trainer.parallel.launcher import end_with_launcher, is_main_process
from student_trainer.rewards import Rewards, make_rewards
from student_trainer.rollout_client.local_services import rollout_services
from student_trainer.run.model_checks import check_hub
from student_trainer.teachers.connections import connect


def main() -> int:
    """Run the attempt and return its exit code.

    Progress and the verdict are written to the run directory. After SIGTERM, the trainer finishes
    the current step, saves a checkpoint and stops.
    """
    parser = argparse.ArgumentParser(prog="student_trainer", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the run directory of the job")
    parser.add_argument("--attempt", type=int, required=True, help="number of this attempt")
    parser.add_argument(
        "--from-step",
        type=int,
        default=None,
        help="resume from the checkpoint of this step (default: the newest intact one)",
    )
    options = parser.parse_args()
    terminated = prepare()
    end_with_launcher()
    run = RunDirectory(options.run)
    config = run.config()
    assert isinstance(config, TrainingJob), "launch.py selects the program"
    progress = Progress(
        run,
        attempt=options.attempt,
        max_steps=config.max_steps,
        main=is_main_process(),
        terminated=terminated,
    )
    return run_to_verdict(
        progress,
        lambda: _explain_errors(
            lambda: _run_attempt(run, config, progress, options.attempt, options.from_step)
        ),
        run.held() if is_main_process() else nullcontext(),
    )


def _explain_errors(attempt: Callable[[], Verdict]) -> Verdict:
    """Run `attempt` and return its verdict. Translate two kinds of RuntimeError.

    Raises AttemptDied if another process died or does not answer, and InvalidInput if the GPU or
    the machine has too little memory.
    """
    try:
        return attempt()
    except RuntimeError as error:
        from student_trainer.parallel.collectives import is_lost_process_error, is_out_of_memory

        if is_out_of_memory(error):
            raise InvalidInput(
                f"not enough memory: {str(error).partition('. ')[0]}",
                field="train.tokens_per_micro_batch",
                hint="lower the value; `distill plan JOB.toml` computes the memory of the job and"
                " names other keys that save memory",
            ) from error
        if is_lost_process_error(error):
            fault = str(error).partition(". ")[0]
            end = "not answered" if "timed out" in fault.lower() else "died"
            raise AttemptDied(f"another process of the trainer has {end}: {fault}") from error
        raise


def _run_attempt(
    run: RunDirectory,
    config: AnyTraining,
    progress: Progress,
    attempt: int,
    from_step: int | None,
) -> Verdict:
    """Run the checks (cheapest first), connect to the teachers, train, and return the verdict."""
    progress.say("preflight", 0)
    check_files(config)
    config = files_on_disk(config)
    check_here(config, run.path)
    config = connected(config, run.path)
    check_hub(config)
    with connect(config) as teachers:
        infos = {name: teacher.info for name, teacher in teachers.items()}
        limits = (
            resumed_limits(config, run.path)
            or _copied_limits(config, progress)
            or fit_limits(config, contexts_of(infos), remote=True)
        )
        if is_main_process():
            write_limits(run.path, limits)
        config = limits.apply(config)
        check_teachers(config, infos)
        with rollout_services(config) as service, _open_rewards(config) as rewards:
            from student_trainer.assembly import assemble

            return assemble(
                config, run, teachers, progress, attempt, from_step, rewards, service
            ).train()


def _copied_limits(config: AnyTraining, progress: Progress) -> Limits | None:
    """Return the limits that an attempt on another machine has stored in `checkpoint.copy_to`.

    Returns None if the job has no `checkpoint.copy_to`, or if no copies of the job are stored
    there.
    """
    if config.checkpoint.copy_to is None:
        return None
    from student_trainer.checkpoints.copies import copied_limits

    return copied_limits(config, progress)


def _open_rewards(config: AnyTraining) -> AbstractContextManager[Rewards | None]:
    if config.reward_table is None:
        return nullcontext()
    return make_rewards(config.reward_table, processes=config.processes)


if __name__ == "__main__":
    sys.exit(main())
