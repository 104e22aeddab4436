"""A key that has no effect with the other keys is refused, with its line and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.config.file import load_job
from clients.config.kinds import parse_job
from protos.errors import InvalidInput

STUDENT = 'student.model = "s"\n'
ON_POLICY = STUDENT + 'data.path = "d.jsonl"\n'
RL = ON_POLICY + 'method.type = "rl"\nreward.type = "math"\n'
KL = ON_POLICY + 'method.type = "rl"\nteacher.address = "t:1"\n'
COIN, FORWARD = "method.tail = 'bucket+sampled'\n", "method.divergence = 'forward_kl'\n"
HEAD = "method.head = 'teacher'\n"
OFFLINE = STUDENT + 'data.path = "store"\nmethod.type = "offline"\n'
SFT = ON_POLICY + 'method.type = "sft"\n'
TEXT, TALK = "data.chat_template = false\n", "data.messages_column = 'm'\n"
OTHER = "data.tokenizer = 'auto'\n"
CAPTURE = 'method.type = "capture"\ndata.path = "d.jsonl"\n'
SERVED = CAPTURE + 'teacher.address = "t:1"\n'
LOADED = CAPTURE + 'teacher.model = "t"\n'

# (job, a key without effect that is not at its default, part of the remedy)
REFUSED = [
    (RL + "method.dynamic_sampling = 2\n", "epochs = 2.0", "set max_steps"),
    (ON_POLICY, "data.teacher_column = 'by'", "add the teachers to this table"),
    (ON_POLICY, "data.answer_column = 'a'", "eval.metric = 'exact_match'"),
    (
        ON_POLICY + "teachers.maths = 't:1'\n",
        "teacher.address = 't:2'",
        "remove one of the two keys",
    ),
    (ON_POLICY + "teachers.maths = 't:1'\n", "teacher.adapter = 'a'", "remove one of the two keys"),
    (
        ON_POLICY + "teacher.model = 't'\n",
        "teacher.adapter = 'a'",
        "set teacher.address to a teacher",
    ),
    (LOADED, "teacher.adapter = 'a'", "remove one of the two keys"),
    (ON_POLICY + COIN, "teacher.tail_draws = 4", "remove one of the two keys"),
    (ON_POLICY + HEAD, "teacher.tail_draws = 4", "remove one of the two keys"),
    (ON_POLICY + FORWARD, "method.head = 'teacher'", "only reverse_kl with one tokenizer"),
    (ON_POLICY + "teacher.tokenizer = 'auto'\n", "method.head = 'teacher'", "with one tokenizer"),
    (ON_POLICY, "method.horizon = 'answer'", "set teacher.tokenizer"),
    (ON_POLICY, "teacher.roles = { a = 'b' }", "set teacher.tokenizer"),
    (
        ON_POLICY + "teacher.tokenizer = 'auto'\nteacher.roles = { a = 'b' }\n",
        "method.horizon = 'answer'",
        "remove one of the two keys",
    ),
    (ON_POLICY + TEXT, "teacher.template_arguments = { a = 1 }", "switches the chat template off"),
    (LOADED + "data.form = 'text'\n", "teacher.context = 'a'", "without images"),
    (
        ON_POLICY + "teachers.maths = 't:1'\n",
        "teacher.tokenizer = 'auto'",
        "remove one of the two keys",
    ),
    (OFFLINE, "method.match = 'word'", "set data.tokenizer"),
    (OFFLINE, "data.prompts = 'p.jsonl'", "set data.tokenizer"),
    (OFFLINE, "data.roles = { a = 'b' }", "set data.tokenizer"),
    (OFFLINE + OTHER + "data.roles = { a = 'b' }\n", "method.match = 'word'", "of every token"),
    (OFFLINE + OTHER, "method.tail = 'none'", "is not used with another tokenizer"),
    (KL, "teacher.roles = { a = 'b' }", "set teacher.tokenizer"),
    (
        KL + "data.chat_template = false\n",
        "teacher.template_arguments = { a = 1 }",
        "switches the chat template off",
    ),
    (RL + COIN, "method.tail_draws = 4", "the loss uses no draws"),
    (RL + FORWARD, "method.tail_draws = 4", "the loss uses no draws"),
    (RL + "method.beta = 0.0\n", "method.tail_draws = 4", "need a KL"),
    (ON_POLICY, "rollouts.gpus = 1", "the trainer samples without an engine"),
    (ON_POLICY, "rollouts.patience_seconds = 5.0", "set rollouts.engine or rollouts.lag"),
    (RL + "rollouts.address = 'r:1'\n", "rollouts.gpus = 1", "rollouts.address has its own"),
    (RL + "rollouts.lag = 1\n", "rollouts.gpu_memory_share = 0.5", "only a vllm engine"),
    (RL + "rollouts.engine = 'vllm'\n", "rollouts.in_flight = 'keep'", "no answer is unfinished"),
    (RL + "method.top_k = 0\n", "method.tail_draws = 4", "method.top_k > 0"),
    (RL, "method.gae_lambda = 0.9", "set method.advantages = 'gae'"),
    (RL, "method.critic_learning_rate = 0.1", "set method.advantages = 'gae'"),
    (RL, "method.teacher_beta = 0.5", "add the table `teacher`"),
    (RL, "data.teacher_column = 'by'", "remove the key"),
    (RL + "anchor.tau = 1.0\n", "anchor.update_period = 3", "lower anchor.tau"),
    (RL + "method.beta = 0.0\n", "anchor.tau = 0.5", "raise method.beta"),
    (RL + "method.beta = 0.0\n", "anchor.update_period = 3", "raise method.beta"),
    (RL + "method.beta = 0.0\n", "method.kl_in = 'reward'", "raise method.beta"),
    (RL + "method.beta = 0.0\n", "method.tail = 'none'", "raise method.beta"),
    (RL + "method.beta = 0.0\n", "method.divergence = 'forward_kl'", "raise method.beta"),
    (RL + "method.top_k = 0\n", "method.tail = 'none'", "set method.estimator instead"),
    (RL.replace("math", "f1"), "reward.timeout_seconds = 3.0", "remove the key"),
    (
        RL + "environment.retriever = 'p.jsonl'\n",
        "environment.timeout_seconds = 3.0",
        "remove the key",
    ),
    (KL, "method.reward_weight = 0.5", "add the table `reward`"),
    (KL, "method.advantages = 'gae'", "add the table `reward`"),
    (KL, "method.clip_low = 0.1", "add the table `reward`"),
    (KL, "method.clip_high = 0.1", "add the table `reward`"),
    (KL, "method.ratio = 'sequence'", "add the table `reward`"),
    (KL, "data.answer_column = 'a'", "remove the key"),
    (RL, "data.weight_column = 'w'", "weights answers by rewards; remove the key"),
    (RL, "student.compile = true", "updates with equal rounding; remove the key"),
    (ON_POLICY + TEXT, "data.messages_column = 'm'", "remove one of the two keys"),
    (ON_POLICY + TEXT, "data.system = 'Be brief.'", "data.chat_template = false"),
    (ON_POLICY + TEXT, "data.template_arguments = { a = 1 }", "remove one of the two keys"),
    (ON_POLICY + TALK, "data.prompt_column = 'q'", "conversations of data.messages_column"),
    (ON_POLICY + TALK, "data.template = 'Q: {prompt}'", "conversations of data.messages_column"),
    (RL + TALK, "data.template = 'Q: {prompt}'", "conversations of data.messages_column"),
    (SFT, "data.teacher_column = 'by'", "has no teacher"),
    (SFT, "method.max_new_tokens = 7", "set eval.metric"),
    (SFT, "method.train_on = 'all'", "set data.messages_column"),
    (SFT + TALK, "data.answer_column = 'a'", "messages of data.messages_column"),
    (SFT + TEXT, "data.system = 'Be brief.'", "data.chat_template = false"),
    (OFFLINE, "data.system = 'Be brief.'", "data.eval_prompts"),
    (OFFLINE, "data.chat_template = false", "data.eval_prompts"),
    (OFFLINE, "data.messages_column = 'm'", "data.eval_prompts"),
    (LOADED + TEXT, "data.system = 'Be brief.'", "data.chat_template = false"),
    (LOADED + "data.form = 'text'\n", "data.system = 'Be brief.'", "set another data.form"),
    (LOADED + "data.form = 'messages'\n", "data.chat_template = false", "needs the chat template"),
    (KL, "method.dynamic_sampling = 3", "gae uses no groups"),
    (RL + "method.advantages = 'gae'\n", "method.dynamic_sampling = 3", "without gae"),
    (KL, "eval.temperature = 1.0", "set eval.metric or a reward"),
    (OFFLINE, "data.eval_prompts = 'e.jsonl'", "eval.metric = 'exact_match'"),
    (OFFLINE, "data.prompt_column = 'q'", "data.eval_prompts"),
    (OFFLINE, "data.answer_column = 'a'", "data.eval_prompts"),
    (OFFLINE, "data.template = 'Q: {prompt}'", "data.eval_prompts"),
    (OFFLINE, "method.max_new_tokens = 7", "method.on_policy_fraction or eval.metric"),
    (OFFLINE, "rollouts.lag = 1", "set method.on_policy_fraction"),
    (OFFLINE, "rollouts.engine = 'vllm'", "set method.on_policy_fraction"),
    (SERVED, "teacher.engine = 'vllm'", "set teacher.model"),
    (SERVED, "teacher.dtype = 'float16'", "set teacher.model"),
    (SERVED, "teacher.device = 'cpu'", "set teacher.model"),
    (SERVED, "teacher.max_batch_tokens = 7", "set teacher.model"),
    (SERVED, "method.ray = {}", "set teacher.model to a directory or a hub id"),
    (LOADED, "teacher.address = 't:1'", "remove one of the two keys"),
    (LOADED, "teacher.patience_seconds = 1.0", "remove one of the two keys"),
    (LOADED, "teacher.prefetch_mib = 1", "remove one of the two keys"),
    (
        LOADED + "student.model = 's'\n",
        "student.chat_template = 't.jinja'",
        "uses the chat template of its tokenizer",
    ),
    (LOADED, "data.messages_column = 'm'", "data.form = 'messages'"),
    (LOADED, "data.text_column = 't'", "data.form = 'text'"),
    (LOADED + "data.form = 'text'\n", "data.prompt_column = 'q'", "data.form = 'completion'"),
    (LOADED + "data.form = 'text'\n", "data.answer_column = 'q'", "data.form = 'completion'"),
    (LOADED + "data.form = 'text'\n", "data.template = '{prompt}.'", "data.form = 'completion'"),
]
# The same keys where they have an effect.
USED = [
    *(job + "epochs = 2.0\n" for job in (ON_POLICY, RL, SFT, OFFLINE)),
    ON_POLICY + "teachers.maths = 't:1'\ndata.teacher_column = 'by'\n",
    ON_POLICY + "eval.metric = 'exact_match'\ndata.answer_column = 'a'\n",
    # Users try a job of a hub data set on a file with --set data.path=FILE.
    ON_POLICY + "data.name = 'main'\ndata.split = 'test'\n",
    ON_POLICY.replace("d.jsonl", "org/data") + "data.name = 'main'\ndata.split = 'test'\n",
    ON_POLICY + "data.eval_path = 'org/data'\ndata.split = 'test'\n",
    ON_POLICY + "teacher.tail_draws = 4\n",
    ON_POLICY + "teacher.tokenizer = 'auto'\nmethod.horizon = 'answer'\n",
    ON_POLICY + FORWARD + "teacher.tokenizer = 'auto'\nteacher.roles = { a = 'b' }\n",
    ON_POLICY + "teacher.context = '{answer}'\nteacher.template_arguments = { thinking = true }\n",
    LOADED + "teacher.context = '{answer}'\n",
    ON_POLICY + FORWARD + "teacher.tail_draws = 4\n",
    OFFLINE
    + OTHER
    + "data.prompts = 'p.jsonl'\ndata.messages_column = 'm'\nmethod.match = 'word'\n",
    OFFLINE + OTHER + "data.system = 'Be brief.'\nmethod.cross_entropy = 0.5\n",
    OFFLINE + OTHER + "data.roles = { a = 'b' }\nmethod.tail = 'none'\n",
    RL + "method.tail_draws = 4\n",
    KL + "teacher.tokenizer = 'auto'\nteacher.roles = { a = 'b' }\n",
    KL + "teacher.template_arguments = { thinking = true }\n",
    KL + "method.kl_in = 'reward'\nmethod.tail_draws = 4\n",
    RL + "method.advantages = 'gae'\nmethod.gae_lambda = 0.9\nmethod.critic_learning_rate = 0.1\n",
    RL + "teacher.address = 't:1'\nmethod.teacher_beta = 0.5\n",
    RL + "method.beta = 0.0\nteacher.address = 't:1'\nmethod.tail = 'none'\n",
    RL + "method.clip_low = 0.1\nmethod.ratio = 'sequence'\nreward.timeout_seconds = 3.0\n",
    KL + "method.kl_in = 'reward'\nmethod.clip_low = 0.1\n",
    KL + "method.reward_weight = 0.0\nmethod.rollouts_per_prompt = 1\n",
    RL + "environment.retriever = 'http://r:1/'\nenvironment.timeout_seconds = 3.0\n",
    OFFLINE + "method.on_policy_fraction = 0.5\nteacher.address = 't:1'\n"
    "method.max_new_tokens = 7\nrollouts.lag = 1\nrollouts.patience_seconds = 5.0\n",
    OFFLINE + "eval.metric = 'exact_match'\ndata.eval_prompts = 'e.jsonl'\n"
    "data.template = 'Q: {prompt}'\nmethod.max_new_tokens = 7\n",
    ON_POLICY + TALK + "data.system = 'Be brief.'\ndata.template_arguments = { a = 1 }\n",
    ON_POLICY + TEXT + "data.template = 'Q: {prompt}'\n",
    ON_POLICY + "data.mix = [{ path = 'b.jsonl', share = 0.25 }]\ndata.weight_column = 'w'\n",
    SFT + "data.answer_column = 'a'\ndata.weight_column = 'w'\nmethod.max_tokens = 9\n",
    SFT + TALK + "method.train_on = 'all'\n",
    SFT + TALK + "eval.metric = 'exact_match'\ndata.answer_column = 'a'\n",
    SFT + "eval.metric = 'exact_match'\nmethod.max_new_tokens = 7\n",
    OFFLINE + "eval.metric = 'exact_match'\ndata.eval_prompts = 'e.jsonl'\n"
    "data.messages_column = 'm'\ndata.system = 'Be brief.'\n",
    LOADED + "data.system = 'Be brief.'\ndata.template_arguments = { a = 1 }\n",
    LOADED + TEXT,
    LOADED + "teacher.engine = 'vllm'\nmethod.ray = {}\n",
    SERVED + "teacher.patience_seconds = 1.0\n",
]


@pytest.mark.parametrize(("text", "line", "remedy"), REFUSED, ids=lambda text: text.split("\n")[-1])
def test_a_key_without_effect_is_refused(tmp_path: Path, text: str, line: str, remedy: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    load_job(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text(text + line + "\n")
    with pytest.raises(InvalidInput) as caught:
        load_job(tmp_path / "job.toml")
    key = line.split(" = ")[0]
    message = caught.value.message
    assert message.startswith(f"{tmp_path / 'job.toml'}:{text.count(chr(10)) + 1}: {key}: has no")
    assert remedy in message
    assert "\n" not in message, "one problem, one line"


@pytest.mark.parametrize("text", USED)
def test_a_key_with_an_effect_is_accepted(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.toml").write_text(text)
    job = load_job(tmp_path / "job.toml").config
    assert parse_job(job.model_dump_json(), strict=True) == job


def test_a_default_that_is_written_down_is_accepted() -> None:
    """A resolved job lists every key, so the server sees all defaults."""
    job = parse_job('{"student": {"model": "s"}, "data": {"path": "d.jsonl"}}')
    assert parse_job(job.model_dump_json(), strict=True) == job


def test_draws_are_of_the_students_tail(tmp_path: Path) -> None:
    """Draws are outside the student's head; with head = 'teacher', the default has no draws."""
    path = tmp_path / "job.toml"
    path.write_text(ON_POLICY + HEAD + "method.tail = 'bucket+draws'\n")
    with pytest.raises(InvalidInput, match=r"method.tail: needs head = 'student'"):
        load_job(path)


def test_forward_kl_needs_the_students_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(ON_POLICY + FORWARD + "teacher.tokenizer = 'auto'\n")
    with pytest.raises(InvalidInput, match=r"method.divergence: needs a teacher with the stud"):
        load_job(path)


def test_sampled_answers_need_a_store_of_the_same_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    mixed = "method.on_policy_fraction = 0.5\nteacher.address = 't:1'\n"
    path.write_text(OFFLINE + OTHER + mixed)
    with pytest.raises(InvalidInput, match=r"on_policy_fraction: needs a store with the student"):
        load_job(path)
