"""The metrics of a run: each name in metrics.jsonl and what it means.

loss                 mean loss of a token, with its weight: the value that training minimises
kl/teacher           unbiased estimate of the KL between student and teacher, nats per token
entropy              entropy of the student over the whole vocabulary, nats per token
ratio/mean           mean of rho = p(y) / mu(y), mu the policy that sampled y; its expectation is 1
ratio/ess            1 / mean of rho^2: effective sample size, as a share; 1 on-policy
ratio/kl             unbiased estimate of KL(mu||p), nats per token; 0 on-policy
topk/student_mass    mean probability that the student gives to the head ids
topk/teacher_mass    mean probability that the teacher gives to the head ids
topk/gradient_sd     sd of a token's gradient with k and M independent draws, divided by its norm
length/mean          mean number of learned tokens (with a term in the loss) of a sequence
length/truncated     share of the student's answers that were cut at max_new_tokens
grad_norm            norm of the gradient before clipping
grad_norm/skipped    share of updates that changed no weight: no finite gradient, or no token
lr                   learning rate
tokens               learned tokens of the step, over all processes
flops                model FLOPs of forward and backward passes of the step, over all processes
tokens_per_sec       learned tokens per second of the step, over all processes
tokens_per_sec/process tokens_per_sec divided by the number of processes (GPUs)
memory/peak          peak GiB of tensors on the GPU in the step; CPU: peak resident since start
time/step            seconds of the step without evaluation and saving
time/rollout         seconds to sample the rollouts and request their rows, or to wait for an engine
time/teacher_wait    seconds that training waited for the teacher's rows after sampling
time/optim           seconds to clip the gradient, run AdamW and update the anchor
eval/kl              kl/teacher on held-out sequences
eval/kl_stderr       standard error of eval/kl over the held-out sequences
eval/accuracy        share of the answers to held-out prompts that match the reference

Additional metrics on a GPU:

mfu                  model FLOPs of forward and backward passes, divided by the peak FLOPs of the
                     GPUs in the time of these passes and of the optimizer; only for known GPUs
memory/reserved      peak GiB that PyTorch reserved on the GPU in the step

Additional metric of jobs whose rollouts an engine samples:

rollout/lag          age in steps of the weights that sampled a token, mean over tokens

A job with a running teacher that has another tokenizer has no metrics topk/... Its loss, kl/teacher
and eval/kl are the mean of log p - log q over the student's tokens. Additional metrics of this job:

pair/one_to_one      share of the student's tokens that are one token of the teacher
pair/other_spelling  share of answers that the student's tokenizer encodes with other tokens
pair/left_out        share of answers that cannot be aligned, or that are too long to be read

A job with a store that has another tokenizer has no metrics topk/... Its kl/teacher and eval/kl are
the mean of log q - log p over the student's tokens: the forward KL if the teacher has written the
answers. It also has pair/one_to_one and pair/left_out.

Additional metrics of stored sequences, which have no ratio/... and no length/truncated:

kl/teacher_bound     lower bound of kl/teacher (bucket tail), if the store has no tail samples
cross_entropy        mean -log p of the stored tokens, nats per token, at the store's temperature;
                     in supervised fine-tuning, of the learned tokens
eval/kl_bound        kl/teacher_bound on held-out sequences
eval/kl_bound_stderr standard error of eval/kl_bound over the held-out sequences
eval/perplexity      exp(cross_entropy) on held-out sequences
time/rollout         seconds to wait for the disk, and to sample if the job has a live teacher

Metrics of supervised fine-tuning: those above, without the names that begin with kl/, topk/, ratio/
and eval/kl, and:

eval/cross_entropy   cross_entropy of the reference answers to held-out prompts, nats per token
eval/cross_entropy_stderr  standard error of eval/cross_entropy over the held-out sequences

Additional metrics of RL, where the metrics of the teacher need a job with a teacher:

reward/mean          mean reward of the answers of the step
reward/std           standard deviation of the rewards of one prompt's answers, mean over prompts
reward/flat_groups   share of prompts whose answers all have the same reward (group advantage 0)
reward/errors        share of answers without a reward: scoring or the retriever failed
search/queries       mean number of search queries of an answer
search/failed        share of answers whose retriever failed; they have no reward
sampling/rounds      rounds of sampling of the step, with method.dynamic_sampling only
sampling/dropped     groups that were sampled and not learned from, over all processes
critic/loss          mean of (value - target)^2 / 2 before the critic's update, with GAE only
ratio/bounded        share of tokens whose weight importance_clip or importance_mask changes
ratio/clipped        share of tokens whose policy gradient is zero because the ratio is clipped
kl/anchor            unbiased estimate of the KL between student and anchor, nats per token
topk/anchor_mass     mean probability that the anchor gives to the head ids
topk/anchor_gradient_sd  topk/gradient_sd of the KL to the anchor; likewise for the teacher
anchor/gap           |student - anchor| / |anchor| over all trainable weights
anchor/version       number of updates of the anchor
time/reward          seconds to compute the rewards
time/anchor          seconds to compute the anchor's rows
time/old_policy      seconds to compute p_old for the updates after the first
eval/reward          mean reward of the answers to held-out prompts: greedy, or eval.samples
eval/reward_stderr   standard error of eval/reward over the held-out prompts
eval/anchor/kl       eval/kl of the anchor in place of the student
eval/anchor/kl_stderr eval/kl_stderr of the anchor
eval/anchor/accuracy eval/accuracy of the anchor
eval/anchor/reward   eval/reward of the anchor
eval/anchor/reward_stderr eval/reward_stderr of the anchor

If the job has several teachers, kl/teacher/NAME is kl/teacher over the tokens that NAME scored.

Metrics of an evaluation (method eval), whose steps are answers; those of the last step:

eval/accuracy        share of all answers with a reward of at least 1 (pass@1)
eval/reward          mean reward of all answers; an answer without a reward counts as 0
eval/pass@N          share of prompts with a right answer among all N
eval/maj@N           share of prompts whose most frequent answer of N is right
eval/anchor/...      the four metrics above, of the anchor, if the model has one
reward/errors        share of answers without a reward
length/mean          mean number of tokens of an answer, over prompts
length/truncated     share of the answers that were cut at max_new_tokens

Times and memory are measured in the main process. A mean with nothing to count is left out.
"""

from __future__ import annotations

from clients.config.tables.common import TrackConfig
from clients.runs.directory import RunDirectory
from clients.runs.metrics_file import MetricsLog
from student_trainer.run.trackers import start_trackers


def open_metrics(
    run: RunDirectory, *, attempt: int, last_step: int | None, track: TrackConfig
) -> MetricsLog:
    """Open metrics.jsonl, and start the trackers of the job. Only the main process may call it.

    `last_step`: the step from which the run resumes; lines of later steps are removed. None: start
    a new file. Raises WrongState if a newer attempt has taken over the run.
    """
    trackers = start_trackers(track, run, last_step)
    return MetricsLog(run, attempt=attempt, last_step=last_step, trackers=trackers)
