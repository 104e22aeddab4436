"""The losses that stay unbiased with rows of an endpoint, by enumeration of the sampled token.

For every token y that the student can sample, the answer of a server is written as the server
writes it, and read as the engine reads it; expectations are sums over y. What a teacher refuses
because it would be biased (other temperatures, the student's ids where the server chooses) is in
tests/vllm/test_endpoint.py and tests/clients/preflight/test_teachers.py.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.teacher.query import ScoreQuery
from protos.rows.codec import RowBlock
from student_trainer.losses import Rows, Tail, rows_from_logits, topk_kl
from teacher_service.engines.endpoint_wire import (
    ECHO,
    VLLM,
    LikeliestWire,
    read_chosen_ids_rows,
)

V, K = 60, 8
RANDOM = torch.Generator().manual_seed(0)
STUDENT = torch.randn(V, dtype=torch.float64, generator=RANDOM).mul_(1.5).requires_grad_()
TEACHER = (torch.randn(V, dtype=torch.float64, generator=RANDOM) * 1.5).log_softmax(0)
P = STUDENT.detach().softmax(0)
ORDER = [int(token_id) for token_id in TEACHER.argsort(descending=True)]


def build_listed_answer(y: int) -> dict[str, Any]:
    """The answer of vLLM: the k likeliest, and y with its rank."""
    ids = dict.fromkeys([y, *ORDER[:K]])
    row = {
        str(token_id): {"logprob": float(TEACHER[token_id]), "rank": ORDER.index(token_id) + 1}
        for token_id in ids
    }
    return {"choices": [{"prompt_logprobs": [None, row]}]}


def build_echoed_answer(y: int, *, count: int = K + 2) -> dict[str, Any]:
    """The answer of a server that echoes: the k + 1 likeliest, and y as one more.

    `most`: ids that it lists; with k + 1, y is in the place of the last one.
    """
    ids = [token_id for token_id in ORDER[: K + 1] if token_id != y][: count - 1]
    row = {f"token_id:{token_id}": float(TEACHER[token_id]) for token_id in (y, *ids)}
    tokens = ["token_id:0", f"token_id:{y}"]
    scored = [None, float(TEACHER[y])]
    logprobs = {"tokens": tokens, "token_logprobs": scored, "top_logprobs": [None, row]}
    return {"choices": [{"logprobs": logprobs}]}


def echoed_in_place(y: int) -> dict[str, Any]:
    return build_echoed_answer(y, count=K + 1)


def array(query: ScoreQuery) -> dict[str, Any]:
    """The answer of vLLM to a request for chosen ids."""
    assert query.head_ids is not None
    parts = [query.head_ids, query.token_ids[1:, None]]
    if query.draw_ids is not None:
        parts.insert(1, query.draw_ids)
    file = io.BytesIO()
    np.save(file, TEACHER.numpy()[np.concatenate(parts, 1)].astype(np.float32))
    return {"prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode()}


def sequence(y: int) -> np.ndarray[Any, Any]:
    return np.array([0, y], np.int32)


def expected_gradient(blocks: list[RowBlock], tail: Tail, direction: Any = "reverse") -> Tensor:
    """The expectation of the loss's gradient in the student's logits; block y is of token y."""
    total = torch.zeros((), dtype=torch.float64)
    for y, block in enumerate(blocks):
        assert block.head_ids is not None
        heads = torch.from_numpy(block.head_ids.astype(np.int64))
        teacher = Rows(*(torch.from_numpy(column).double() for column in columns(block)))
        student = rows_from_logits(STUDENT[None], heads, torch.tensor([y]))
        in_head = (heads == y).any(1)
        values = topk_kl(student, teacher, in_head, direction=direction, tail=tail)
        total = total + P[y] * values.sum()
    (gradient,) = torch.autograd.grad(total, STUDENT)
    return gradient


def columns(block: RowBlock) -> tuple[np.ndarray[Any, Any], ...]:
    return block.head_logprobs, block.tail_logmass, block.token_logprobs


def exact_reverse() -> Tensor:
    log_p = STUDENT.log_softmax(0)
    (gradient,) = torch.autograd.grad((log_p.exp() * (log_p - TEACHER)).sum(), STUDENT)
    return gradient


def exact_forward() -> Tensor:
    """Of the forward KL between the k likeliest ids and one bucket of the others."""
    log_p = STUDENT.log_softmax(0)
    head, tail = ORDER[:K], ORDER[K:]
    q = torch.cat([TEACHER[head], TEACHER[tail].logsumexp(0, keepdim=True)])
    p = torch.cat([log_p[head], log_p[tail].logsumexp(0, keepdim=True)])
    (gradient,) = torch.autograd.grad((q.exp() * (q - p)).sum(), STUDENT)
    return gradient


def assert_unbiased(estimate: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(estimate, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("wire", "answer"),
    [
        (VLLM, build_listed_answer),
        (ECHO, build_echoed_answer),
        (ECHO, echoed_in_place),
    ],
)
def test_the_likeliest_ids(wire: LikeliestWire, answer: Any) -> None:
    """Forward with a bucket; and reverse, with the sampled token for what is outside the head."""
    blocks = [wire.read_rows(ScoreQuery(sequence(y), 1, top_k=K), answer(y)) for y in range(V)]
    assert_unbiased(expected_gradient(blocks, "bucket", "forward"), exact_forward())
    assert_unbiased(expected_gradient(blocks, "bucket+sampled"), exact_reverse())


def test_the_sampled_token_in_the_head_is_a_bias() -> None:
    """As vLLM's k + 1 ids would be if all were the head: the token is never outside of it."""
    blocks = []
    for y in range(V):
        [row] = build_listed_answer(y)["choices"][0]["prompt_logprobs"][1:]
        ids = np.array([[int(token_id) for token_id in row]], np.int32)
        query = ScoreQuery(sequence(y), 1, head_ids=ids)
        blocks.append(read_chosen_ids_rows(query, array(query)))
    exact = exact_reverse()
    bias = (expected_gradient(blocks, "bucket+sampled") - exact).norm() / exact.norm()
    assert bias > 0.2


def test_the_students_ids() -> None:
    heads = P.topk(K).indices.numpy().astype(np.int32)[None]
    blocks = []
    for y in range(V):
        query = ScoreQuery(sequence(y), 1, head_ids=heads)
        blocks.append(read_chosen_ids_rows(query, array(query)))
    assert_unbiased(expected_gradient(blocks, "bucket+sampled"), exact_reverse())


def test_draws_of_the_student() -> None:
    """One draw of its tail in each row, enumerated; the sampled token is not read."""
    heads = P.topk(K).indices
    tail = [token_id for token_id in range(V) if token_id not in heads]
    total = torch.zeros((), dtype=torch.float64)
    for z in tail:
        query = ScoreQuery(
            sequence(0),
            1,
            head_ids=heads.numpy().astype(np.int32)[None],
            draw_ids=np.array([[z]], np.int32),
        )
        block = read_chosen_ids_rows(query, array(query))
        teacher = Rows(
            *(
                torch.from_numpy(column).double()
                for column in (*columns(block), get_draw_logprobs(block))
            )
        )
        student = rows_from_logits(
            STUDENT[None], heads[None], torch.tensor([0]), sample_ids=torch.tensor([[z]])
        )
        values = topk_kl(
            student,
            teacher,
            torch.tensor([False]),
            direction="reverse",
            tail="bucket+draws",
            draw_logprobs=(P[z] / P[tail].sum()).log().view(1, 1),
        )
        total = total + P[z] / P[tail].sum() * values.sum()
    (gradient,) = torch.autograd.grad(total, STUDENT)
    assert_unbiased(gradient, exact_reverse())


def get_draw_logprobs(block: RowBlock) -> np.ndarray[Any, Any]:
    assert block.draw_logprobs is not None
    return block.draw_logprobs
