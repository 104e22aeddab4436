"""A talk with a retriever: whose tokens are whose, what is learned from, what decides it."""

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
from student_trainer.data.rollout import Rollout
from student_trainer.model.student import Student
from student_trainer.rollouts.sampler import Marks, Sampler, rollout_noise
from student_trainer.rollouts.search import SearchConversations, SearchRollouts, parse_action
from student_trainer.rollouts.tail_draws import draw_tail
from student_trainer.teachers.source import PendingRows
from tests.student_trainer import tiny
from tests.student_trainer.model_teacher import ModelTeacher, completion_logprobs
from tests.student_trainer.rollouts.asking import IDS, PROMPTS, WORDS, Facts, asking_student


@pytest.fixture(scope="module")
def student() -> Any:
    return asking_student()


def source(
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


def talks(
    rollouts: SearchRollouts, numbers: Sequence[int], prompts: Sequence[Prompt] | None = None
) -> list[Rollout]:
    asked = prompts or [PROMPTS[n % 2] for n in numbers]
    return [one for batch in rollouts.generate(asked, numbers, seed=3) for one in batch]


@pytest.fixture(scope="module")
def found(student: Any) -> list[Rollout]:
    return talks(source(student, Facts()), range(60))


def own(rollout: Rollout) -> Tensor:
    assert rollout.own is not None
    return rollout.own


def test_the_material_has_all_there_is_to_see(found: list[Rollout]) -> None:
    assert {rollout.queries for rollout in found} == {0, 1, 2}
    assert {rollout.truncated for rollout in found} == {True, False}
    assert any(rollout.concluded for rollout in found)


def test_two_turns_rebuilt_by_hand_have_the_same_log_probs(
    student: Any, found: list[Rollout]
) -> None:
    """One plain forward pass over the whole talk; rows of passages are not looked at."""
    for rollout in found:
        exact = completion_logprobs(student, rollout)
        kept = own(rollout)
        token = exact.gather(1, rollout.completion[:, None])[:, 0]
        torch.testing.assert_close(
            rollout.token_logprobs[kept].double(), token[kept], rtol=0, atol=1e-4
        )
        assert torch.equal(rollout.head_ids[kept].long(), exact.topk(4).indices[kept])
        assert len(rollout.head_ids) == len(rollout.token_logprobs) == len(rollout.completion)


def test_passages_stand_where_the_query_ended_and_nowhere_else(found: list[Rollout]) -> None:
    for rollout in found:
        completion, kept = rollout.completion, own(rollout)
        text = WORDS.decode(completion[~kept])
        assert text.count("<information>") == text.count("</information>") == rollout.queries or (
            rollout.truncated and rollout.queries
        )
        begins = (~kept & torch.cat([torch.tensor([True]), kept[:-1]])).nonzero().flatten()
        for first in begins.tolist():
            assert completion[first - 1] == IDS["</search>"]
            block = completion[first:]
            block = block[: int((block == IDS["</information>"]).nonzero()[0]) + 1]
            asked = WORDS.decode(completion[:first])
            query = parse_action(asked[asked.rindex("<search>") :])[1]
            assert WORDS.decode(block).count(f"(Title: {len(query)}) 12=") == 2


def test_neighbours_and_batches_do_not_matter(student: Any, found: list[Rollout]) -> None:
    apart = [talks(source(student, Facts()), [n])[0] for n in range(6)]
    small = talks(source(student, Facts(), batch=900), range(24))
    backwards = talks(source(student, Facts()), range(23, -1, -1))[::-1]
    for others in (apart, small, backwards):
        for one, other in zip(found, others, strict=False):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert torch.equal(own(one), own(other))


@pytest.mark.parametrize("new", [5, 20, 40])
def test_all_turns_together_keep_to_the_budget(student: Any, new: int) -> None:
    for rollout in talks(source(student, Facts(), new=new), range(40)):
        assert len(rollout.completion) <= new
        assert bool(own(rollout)[-1])  # what nobody answers to is not read either
        ended = rollout.completion[-1] in (WORDS.eos_token_id, IDS["</answer>"], IDS["</search>"])
        assert rollout.truncated or ended


def test_long_passages_are_cut_and_closed(student: Any) -> None:
    for rollout in talks(source(student, Facts(), max_passage_tokens=4), range(30)):
        text = WORDS.decode(rollout.completion[~own(rollout)])
        assert text.replace("\n\n<information>Doc </information>\n\n", "") == ""


def test_after_the_last_query_there_are_no_passages(student: Any) -> None:
    retriever = Facts()
    rollouts = talks(source(student, retriever, max_turns=1), range(60))
    assert max(rollout.queries for rollout in rollouts) == 1
    assert len(retriever.asked) == sum(rollout.queries for rollout in rollouts)
    again = [r for r in rollouts if (r.completion == IDS["</search>"]).sum() == 2]
    assert again
    assert all(rollout.concluded == "" for rollout in again)


def test_a_query_that_fails_is_the_fault_of_that_answer_alone(
    student: Any, found: list[Rollout]
) -> None:
    rollouts = talks(source(student, Facts(fails="1")), range(60))
    assert {rollout.failed for rollout in rollouts} == {True, False}
    for one, other in zip(rollouts, found, strict=True):
        if not one.failed:
            assert one.token_ids.tolist() == other.token_ids.tolist()


def test_passages_have_no_gradient_and_no_rows(found: list[Rollout]) -> None:
    """The rows of a batch are the student's own tokens; what is about others, however absurd,
    changes nothing.
    """
    torch.manual_seed(0)
    student = tiny.make_model(len(WORDS), WORDS, 1, 32)
    teacher = ModelTeacher(tiny.make_model(len(WORDS), WORDS, 1, 32))
    rollouts = [rollout for rollout in found if rollout.queries][:3]

    def gradients(absurd: bool) -> list[Tensor]:
        scored = []
        for rollout in rollouts:
            rows = teacher.score(rollout)
            if absurd:
                others = ~own(rollout).numpy()
                rows.result().head_logprobs[others] = 1e9
                rows.result().token_logprobs[others] = np.nan
                rollout.token_logprobs[~own(rollout)] = np.nan
            scored.append(PendingRows(rollout, rows).wait())
        batch = make_batch(scored, torch.device("cpu"))
        assert len(batch) == sum(rollout.learned for rollout in rollouts)
        whole = Student(student)
        out = whole(
            batch,
            lambda rows, i: rows.token_logprobs + (batch.teacher[i].head_logprobs).sum(1),
            1.0,
        )
        student.zero_grad()
        out.loss_sum.backward()
        return [p.grad.clone() for p in student.parameters() if p.grad is not None]

    plain = gradients(absurd=False)
    assert any(g.abs().sum() > 0 for g in plain)
    for one, other in zip(plain, gradients(absurd=True), strict=True):
        assert torch.equal(one, other)


def test_the_gradient_of_logits_before_passages_is_exactly_zero(found: list[Rollout]) -> None:
    rollout = next(rollout for rollout in found if rollout.queries)
    teacher = ModelTeacher(tiny.make_model(len(WORDS), WORDS, 1, 32))
    batch = make_batch([PendingRows(rollout, teacher.score(rollout)).wait()], torch.device("cpu"))
    logits = torch.randn(1, len(rollout.token_ids), len(WORDS), requires_grad=True)
    logprobs = batch.select(logits).log_softmax(1).gather(1, batch.token_ids[:, None])
    logprobs.sum().backward()
    assert logits.grad is not None
    moved = logits.grad[0].abs().sum(1) > 0
    expected = torch.zeros(len(rollout.token_ids), dtype=torch.bool)
    expected[rollout.start - 1 : -1] = own(rollout)
    assert torch.equal(moved, expected)


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
    """Byte-level BPE that cuts the marks in pieces, against a search in the text."""
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


def test_draws_of_passages_are_placeholders(student: Any, found: list[Rollout]) -> None:
    """The draws of own tokens use one random number a token; tokens are as without draws."""
    rollouts = source(student, Facts(), draws=3)
    drawn = talks(rollouts, range(60))
    for number, (rollout, plain) in enumerate(zip(drawn, found, strict=True)):
        assert torch.equal(rollout.token_ids, plain.token_ids)
        assert plain.draws is None
        assert rollout.draws is not None
        assert rollout.draws.ids.shape == (len(rollout.completion), 3)
        kept = own(rollout)
        assert (rollout.draws.logprobs[~kept] == torch.inf).all()
        assert not rollout.draws.ids[~kept].any()
        levels = rollout_noise(number, 3, 200, draws=True)
        exact = completion_logprobs(student, rollout)[kept]
        wanted = draw_tail(exact.exp(), rollout.head_ids[kept].long(), levels[: len(exact)], 3)
        assert torch.equal(rollout.draws[kept].ids, wanted.ids)
