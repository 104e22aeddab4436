"""A job is checked against the limits of its teacher before it is queued."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clients.config.on_policy import OnPolicyJob
from clients.config.rl import RLJob
from clients.preflight.teachers import _check_live_teacher as check_live_teacher
from clients.preflight.teachers import check_teachers
from clients.preflight.vocabulary import common_ids
from clients.store.captured_store import CapturedStore
from clients.teacher.info import TeacherInfo
from protos.errors import InvalidInput, WrongState

INFO = TeacherInfo(
    model="m",
    fingerprint="f",
    version=0,
    tokenizer_fingerprint="t",
    vocab_size=151_936,
    max_top_k=2048,
    max_length=1 << 20,
    dtype="float32",
    engine="hf",
    batch_invariant=True,
    max_tail_samples=64,
    max_tail_draws=256,
    max_request_bytes=64 << 20,
)


def make_job(**method: Any) -> OnPolicyJob:
    teacher = {"address": "t:1", "top_k": method.pop("top_k", 64)}
    if "tail_draws" in method:
        teacher["tail_draws"] = method.pop("tail_draws")
    values = {"student": {"model": "m"}, "data": {"path": "d.jsonl"}, "teacher": teacher}
    return OnPolicyJob.model_validate({**values, "method": method})


def test_a_long_answer_fits_into_several_messages() -> None:
    check_teachers(make_job(max_new_tokens=131_072, top_k=48), {"": INFO})


@pytest.mark.parametrize(
    ("method", "message", "hint"),
    [
        (
            {"max_new_tokens": 131_072, "top_k": 96},
            "teacher.top_k: 131072 tokens with 96 head ids and 48 draws each exceed the size",
            "lower the value or the draws: a row has at most 96 ids",
        ),
        (
            {"divergence": "forward_kl", "tail_draws": 65},
            "method.tail: the teacher draws 64 tail samples per row, not 65",
            "lower teacher.tail_draws",
        ),
    ],
)
def test_what_a_teacher_cannot_do_is_refused(
    method: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_teachers(make_job(**method), {"": INFO})
    assert f"{caught.value.field}: {caught.value.message}".startswith(message)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(("kl_in", "remedy"), [("loss", "bucket+sampled"), ("reward", "bucket")])
def test_a_teacher_older_than_draws_has_a_way_out(kl_in: str, remedy: str) -> None:
    older_teacher = replace(INFO, max_tail_draws=0)
    values = {"student": {"model": "m"}, "data": {"path": "d.jsonl"}, "teacher": {"address": "t:1"}}
    method = {"type": "rl", "kl_in": kl_in}
    job_with_reward = {**values, "reward": {"type": "math"}}
    with pytest.raises(InvalidInput) as caught:
        check_teachers(
            RLJob.model_validate({**job_with_reward, "method": method}), {"": older_teacher}
        )
    assert caught.value.message == "the teacher scores 0 tail draws per row, not 48"
    assert f"or use '{remedy}'" in str(caught.value.hint)
    changed_job = RLJob.model_validate({**job_with_reward, "method": {**method, "tail": remedy}})
    check_teachers(changed_job, {"": older_teacher})


@pytest.mark.parametrize(
    ("method", "limits", "message"),
    [
        (
            {},
            {"max_chosen_ids": 0},
            "method.divergence: the teacher scores only its own most likely ids",
        ),
        ({"top_k": 30}, {"max_chosen_ids": 32}, "teacher.top_k: the teacher scores 32 chosen ids"),
        ({"temperature": 0.5}, {"only_temperature_one": True}, "method.temperature: the teacher"),
    ],
)
def test_the_limits_of_an_endpoint(
    method: dict[str, Any], limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_teachers(make_job(**method), {"": replace(INFO, **limits)})
    assert message in str(caught.value)
    assert caught.value.hint
    endpoint = replace(INFO, max_chosen_ids=0, only_temperature_one=True)
    check_teachers(make_job(divergence="forward_kl", tail="bucket", top_k=30), {"": endpoint})
    check_teachers(make_job(head="teacher", top_k=30), {"": endpoint})


@pytest.mark.parametrize(
    ("student_size", "teacher_size", "common"),
    [(151_936, 152_064, 151_936), (152_064, 151_936, 151_936), (700, 700, 700)],
)
def test_padding_is_not_common(student_size: int, teacher_size: int, common: int) -> None:
    """With equal numbers of logits no id is left out, whatever the padding is."""
    tokens = [f"t{number}" for number in range(600)]
    assert common_ids(student_size, teacher_size, "teacher", tokens) == common


@pytest.mark.parametrize(
    ("student_size", "teacher_size", "program"),
    [(599, 640, "the student"), (640, 599, "the teacher math")],
)
def test_an_id_with_a_token_is_no_padding(
    student_size: int, teacher_size: int, program: str
) -> None:
    tokens = [*(f"t{number}" for number in range(599)), "<image>"]
    with pytest.raises(WrongState) as caught:
        common_ids(student_size, teacher_size, "teacher math", tokens)
    assert caught.value.field == "student.model"
    assert (
        f"id 599 is the token '<image>', for which {program} has no logit" in caught.value.message
    )
    assert common_ids(student_size, teacher_size, "teacher math", [*tokens[:-1], ""]) == 599


def test_a_live_teacher_may_be_wider_than_the_store() -> None:
    """The teacher then leaves out the ids that the store left out, unless it is too old."""
    facts = {
        "tokenizer_fingerprint": "t",
        "vocab_size": "151665",
        "temperature": "1.0",
        "tail_samples": "0",
        "top_k": "4",
        "teacher_fingerprint": "f",
    }
    store = CapturedStore("rows", "data.path", facts, 9)
    check_live_teacher(replace(INFO, takes_vocab_size=True), "teacher", store)
    with pytest.raises(WrongState, match="cannot exclude the padding ids, 151665 and above"):
        check_live_teacher(INFO, "teacher", store)
    narrow_teacher = replace(INFO, vocab_size=151_000, takes_vocab_size=True)
    with pytest.raises(WrongState, match="the number of logits of the teacher differs"):
        check_live_teacher(narrow_teacher, "teacher", store)
    other_tokenizer = replace(INFO, tokenizer_fingerprint="u", takes_vocab_size=True)
    with pytest.raises(WrongState, match="the tokenizer_fingerprint of the teacher differs"):
        check_live_teacher(other_tokenizer, "teacher", store)
