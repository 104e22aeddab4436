"""What a run measures, and where it is written.

loss                 the objective, nats a token
kl/teacher           unbiased KL between student and teacher, nats a token
entropy              of the student over the whole vocabulary, nats a token
ratio/mean           p(y)/mu(y), of the student over the one that sampled: 1 but for rounding
topk/student_mass    probability that the student gives to the head
topk/teacher_mass    probability that the teacher gives to the head
length/mean          learned tokens of a sequence
length/truncated     share of the student's answers cut at max_new_tokens
grad_norm            before clipping
lr                   learning rate
tokens               scored tokens of the step, over all processes
tokens_per_sec       scored tokens a second of the step
time/step            seconds of the step; of it time/rollout, time/teacher_wait, time/optim
eval/kl              kl/teacher on what is held out
eval/accuracy        share of held-out answers that are right

Of stored sequences, which have no ratio and no answers that are cut:

kl/teacher_bound     a lower bound of kl/teacher (bucket), where the teacher drew no samples
cross_entropy        -log p of the stored tokens, nats a token, at the temperature of the store
eval/kl_bound        kl/teacher_bound on what is held out
eval/perplexity      exp(cross_entropy) on what is held out
time/rollout         to wait for the disk

Of a job with rewards, where `kl/teacher` and `topk/teacher_mass` are of a teacher, if there is one:

reward/mean          of all answers of the step
reward/std           within a prompt's answers, mean over prompts
reward/flat_groups   share of prompts whose answers all have the same reward: nothing is learned
reward/errors        share of answers that could not be judged
search/queries       queries of an answer that were answered
search/failed        share of answers whose retriever failed: they have no reward
critic/loss          (value - target)^2 / 2 of the critic, where there is one
ratio/clipped        share of tokens beyond clip_low or clip_high: nothing more is learned
kl/anchor            unbiased KL between student and anchor, nats a token
topk/anchor_mass     probability that the anchor gives to the head
anchor/gap           |student - anchor| / |anchor|, of all weights that learn
anchor/version       updates of the anchor
time/reward          seconds to judge the answers
time/anchor          seconds to score them by the anchor
eval/reward          of held-out answers, the likeliest ones
eval/anchor/kl       as eval/kl, of the anchor in the student's place; likewise
eval/anchor/accuracy
eval/anchor/reward

Where a job names several teachers: kl/teacher/NAME, over the tokens that each of them scored.
"""

from __future__ import annotations

from clients.config.common import TrackConfig
from clients.runs.directory import RunDirectory
from clients.runs.metrics_writer import MetricsLog
from student_trainer.run.trackers import start_trackers


def open_metrics(
    run: RunDirectory, *, attempt: int, last_step: int | None, track: TrackConfig
) -> MetricsLog:
    """The run's metrics.jsonl, and the trackers that the job asks for."""
    trackers = start_trackers(track, run, last_step)
    return MetricsLog(run, attempt=attempt, last_step=last_step, trackers=trackers)
