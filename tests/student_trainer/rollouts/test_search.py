"""Conversations with a retriever: token ownership, learned tokens, and reproducibility."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.config.tables.environment import SearchConfig
from student_trainer.data.batch import make_batch
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.model.student import Student
from student_trainer.rollouts.sample_step import draw_tail
from student_trainer.rollouts.sampler import Marks, Sampler, rollout_noise
from student_trainer.rollouts.search import SearchConversations, SearchRollouts, parse_action
from student_trainer.teachers.source import PendingRows
from tests.student_trainer import tiny
from tests.student_trainer.model_teacher import ModelTeacher, completion_logprobs
from tests.student_trainer.rollouts.asking import IDS, PROMPTS, WORDS, Facts, asking_student


@pytest.fixture(scope="module")
def student() -> Any:
    return asking_student()


def make_search(
    student: Any,
    retriever: Any,
    *,
    new: int = 200,
    batch: int = 100_000,
    draws: int = 0,
    **changes: Any,
) -> SearchRollouts:
    config = SearchConfig(retriever="corpus.jsonl", **{"max_turns": 2, **changes})
    sampler = Sampler(student, WORDS, top_k=4, temperature=1.0, draws=draws)
    conversations = SearchConversations(
        WORDS, retriever, config, max_new_tokens=new, batch_tokens=batch
    )
    return SearchRollouts(conversations, sampler, WORDS, stream_tokens=new)


def generate_talks(
    rollouts: SearchRollouts, numbers: Sequence[int], prompts: Sequence[Prompt] | None = None
) -> list[Rollout]:
    chosen_prompts = prompts or [PROMPTS[n % 2] for n in numbers]
    return [
        rollout for batch in rollouts.generate(chosen_prompts, numbers, seed=3) for rollout in batch
    ]


@pytest.fixture(scope="module")
def sampled_talks(student: Any) -> list[Rollout]:
    return generate_talks(make_search(student, Facts()), range(60))


def own_mask(rollout: Rollout) -> Tensor:
    assert rollout.own is not None
    return rollout.own


def test_the_material_has_all_there_is_to_see(sampled_talks: list[Rollout]) -> None:
    assert {rollout.queries for rollout in sampled_talks} == {0, 1, 2}
    assert {rollout.truncated for rollout in sampled_talks} == {True, False}
    assert any(rollout.concluded for rollout in sampled_talks)


def test_two_turns_rebuilt_by_hand_have_the_same_log_probs(
    student: Any, sampled_talks: list[Rollout]
) -> None:
    """One plain forward pass over the conversation; rows of passages are not compared."""
    for rollout in sampled_talks:
        exact_logprobs = completion_logprobs(student, rollout)
        is_own = own_mask(rollout)
        token = exact_logprobs.gather(1, rollout.completion[:, None])[:, 0]
        torch.testing.assert_close(
            rollout.token_logprobs[is_own].double(), token[is_own], rtol=0, atol=1e-4
        )
        assert torch.equal(rollout.head_ids[is_own].long(), exact_logprobs.topk(4).indices[is_own])
        assert len(rollout.head_ids) == len(rollout.token_logprobs) == len(rollout.completion)


def test_passages_stand_where_the_query_ended_and_nowhere_else(
    sampled_talks: list[Rollout],
) -> None:
    for rollout in sampled_talks:
        completion, is_own = rollout.completion, own_mask(rollout)
        text = WORDS.decode(completion[~is_own])
        assert text.count("<information>") == text.count("</information>") == rollout.queries or (
            rollout.truncated and rollout.queries
        )
        passage_starts = (
            (~is_own & torch.cat([torch.tensor([True]), is_own[:-1]])).nonzero().flatten()
        )
        for first in passage_starts.tolist():
            assert completion[first - 1] == IDS["</search>"]
            block = completion[first:]
            block = block[: int((block == IDS["</information>"]).nonzero()[0]) + 1]
            text_before = WORDS.decode(completion[:first])
            query = parse_action(text_before[text_before.rindex("<search>") :])[1]
            assert WORDS.decode(block).count(f"(Title: {len(query)}) 12=") == 2


def test_neighbours_and_batches_do_not_matter(student: Any, sampled_talks: list[Rollout]) -> None:
    single_talks = [generate_talks(make_search(student, Facts()), [n])[0] for n in range(6)]
    small_batches = generate_talks(make_search(student, Facts(), batch=900), range(24))
    backwards = generate_talks(make_search(student, Facts()), range(23, -1, -1))[::-1]
    for variant in (single_talks, small_batches, backwards):
        for rollout, variant_rollout in zip(sampled_talks, variant, strict=False):
            assert rollout.token_ids.tolist() == variant_rollout.token_ids.tolist()
            assert torch.equal(own_mask(rollout), own_mask(variant_rollout))


@pytest.mark.parametrize("new", [5, 20, 40])
def test_all_turns_together_keep_to_the_budget(student: Any, new: int) -> None:
    for rollout in generate_talks(make_search(student, Facts(), new=new), range(40)):
        assert len(rollout.completion) <= new
        assert bool(own_mask(rollout)[-1])  # no passage follows the last query
        is_finished = rollout.completion[-1] in (
            WORDS.eos_token_id,
            IDS["</answer>"],
            IDS["</search>"],
        )
        assert rollout.truncated or is_finished


def test_long_passages_are_cut_and_closed(student: Any) -> None:
    for rollout in generate_talks(make_search(student, Facts(), max_passage_tokens=4), range(30)):
        text = WORDS.decode(rollout.completion[~own_mask(rollout)])
        assert text.replace("\n\n<information>Doc </information>\n\n", "") == ""


def test_after_the_last_query_there_are_no_passages(student: Any) -> None:
    retriever = Facts()
    rollouts = generate_talks(make_search(student, retriever, max_turns=1), range(60))
    assert max(rollout.queries for rollout in rollouts) == 1
    assert len(retriever.queries) == sum(rollout.queries for rollout in rollouts)
    second_queries = [r for r in rollouts if (r.completion == IDS["</search>"]).sum() == 2]
    assert second_queries
    assert all(rollout.concluded == "" for rollout in second_queries)


def test_a_query_that_fails_is_the_fault_of_that_answer_alone(
    student: Any, sampled_talks: list[Rollout]
) -> None:
    rollouts = generate_talks(make_search(student, Facts(fails="1")), range(60))
    assert {rollout.failed for rollout in rollouts} == {True, False}
    for talk, expected_rollout in zip(rollouts, sampled_talks, strict=True):
        if not talk.failed:
            assert talk.token_ids.tolist() == expected_rollout.token_ids.tolist()


def test_passages_have_no_gradient_and_no_rows(sampled_talks: list[Rollout]) -> None:
    """The rows of a batch are the student's own tokens; invalid values of other tokens have no
    effect.
    """
    torch.manual_seed(0)
    student = tiny.make_model(len(WORDS), WORDS, 1, 32)
    teacher = ModelTeacher(tiny.make_model(len(WORDS), WORDS, 1, 32))
    rollouts = [rollout for rollout in sampled_talks if rollout.queries][:3]

    def gradients(absurd: bool) -> list[Tensor]:
        scored_sequences = []
        for rollout in rollouts:
            rows = teacher.score(rollout)
            if absurd:
                is_foreign = ~own_mask(rollout).numpy()
                rows.result().head_logprobs[is_foreign] = 1e9
                rows.result().token_logprobs[is_foreign] = np.nan
                rollout.token_logprobs[~own_mask(rollout)] = np.nan
            scored_sequences.append(PendingRows(rollout, rows).wait())
        batch = make_batch(scored_sequences, torch.device("cpu"))
        assert len(batch) == sum(rollout.learned for rollout in rollouts)
        student_module = Student(student)
        out = student_module(
            batch,
            lambda rows, i: rows.token_logprobs + (batch.teacher[i].head_logprobs).sum(1),
            1.0,
        )
        student.zero_grad()
        out.loss_sum.backward()
        return [p.grad.clone() for p in student.parameters() if p.grad is not None]

    expected_gradients = gradients(absurd=False)
    assert any(g.abs().sum() > 0 for g in expected_gradients)
    for expected, gradient in zip(expected_gradients, gradients(absurd=True), strict=True):
        assert torch.equal(expected, gradient)


def test_the_gradient_of_logits_before_passages_is_exactly_zero(
    sampled_talks: list[Rollout],
) -> None:
    rollout = next(rollout for rollout in sampled_talks if rollout.queries)
    teacher = ModelTeacher(tiny.make_model(len(WORDS), WORDS, 1, 32))
    batch = make_batch([PendingRows(rollout, teacher.score(rollout)).wait()], torch.device("cpu"))
    logits = torch.randn(1, len(rollout.token_ids), len(WORDS), requires_grad=True)
    logprobs = batch.select(logits).log_softmax(1).gather(1, batch.token_ids[:, None])
    logprobs.sum().backward()
    assert logits.grad is not None
    has_gradient = logits.grad[0].abs().sum(1) > 0
    expected = torch.zeros(len(rollout.token_ids), dtype=torch.bool)
    expected[rollout.start - 1 : -1] = own_mask(rollout)
    assert torch.equal(has_gradient, expected)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("x <search> who? </search>", ("search", "who?")),
        ("<answer>\n42 </answer>.", ("answer", "42")),
        ("<search>a <search>b</search>", ("search", "b")),
        ("<answer> no end <search>b</search>", ("search", "b")),
        ("nothing opened</search>", (None, "")),
        ("", (None, "")),
    ],
)
def test_actions(turn: str, expected: tuple[str | None, str]) -> None:
    assert parse_action(turn) == expected


@pytest.mark.parametrize("text", ["so: </search>", "a</search>.", "</searc>h", "x</answer", "b>"])
def test_a_mark_is_found_whatever_its_tokens(text: str) -> None:
    """Byte-level BPE that splits the marks, compared with a search in the text."""
    bpe = tiny.make_tokenizer("bpe", ["the </sea h> rch a.b >. </a"] * 20, 300)
    marks = Marks(bpe, ["</search>", "</answer>"])
    ids = torch.tensor(bpe(text)["input_ids"])
    closed = [
        bool(marks.may_close(ids[n - 1])) and marks.closed_by(ids[:n])
        for n in range(1, len(ids) + 1)
    ]
    expected = [
        "</search>" in bpe.decode(ids[:n]) and "</search>" not in bpe.decode(ids[: n - 1])
        for n in range(1, len(ids) + 1)
    ]
    first = expected.index(True) + 1 if True in expected else len(ids)
    assert closed[:first] == expected[:first]


def test_draws_of_passages_are_placeholders(student: Any, sampled_talks: list[Rollout]) -> None:
    """Draws of own tokens use one random number per token, and do not change tokens."""
    rollouts = make_search(student, Facts(), draws=3)
    talks_with_draws = generate_talks(rollouts, range(60))
    for number, (rollout, expected) in enumerate(zip(talks_with_draws, sampled_talks, strict=True)):
        assert torch.equal(rollout.token_ids, expected.token_ids)
        assert expected.draws is None
        assert rollout.draws is not None
        assert rollout.draws.ids.shape == (len(rollout.completion), 3)
        is_own = own_mask(rollout)
        assert (rollout.draws.logprobs[~is_own] == torch.inf).all()
        assert not rollout.draws.ids[~is_own].any()
        levels = rollout_noise(number, 3, 200, draws=True)
        exact_logprobs = completion_logprobs(student, rollout)[is_own]
        expected_draws = draw_tail(
            exact_logprobs.exp(), rollout.head_ids[is_own].long(), levels[: len(exact_logprobs)], 3
        )
        assert torch.equal(rollout.draws[is_own].ids, expected_draws.ids)
