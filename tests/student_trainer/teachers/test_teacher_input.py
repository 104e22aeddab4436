"""Teachers with another prompt or other special tokens, compared with prompts made by hand."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.teacher.query import ScoreQuery
from protos.errors import InvalidInput
from protos.rows.codec import RowBlock
from student_trainer.cross_tokenizer.comparison import SpecialTokenPair, compare_tokenizers
from student_trainer.data.sequence import Rollout, TailDraws
from student_trainer.model.loading import vocabulary
from student_trainer.teachers.remote import RemoteTeacher
from student_trainer.teachers.source import resolved
from student_trainer.teachers.teacher_input import TeacherInput, teacher_form, teacher_prompt
from teacher_service.engines.hf import HfEngine
from tests.clients.data.test_prompt_format import CHARACTERS, PLAIN, TALK
from tests.student_trainer import tiny
from tests.student_trainer.cross_tokenizer.test_teacher import connected_teacher
from tests.student_trainer.model_teacher import ModelTeacher
from tests.student_trainer.teachers.anchors import rollouts

NO_MATERIAL = tiny.Material(Path(), Path(), Path())
THINKING = PLAIN.replace("A", "{% if not thinking %}N{% endif %}A", 1)


class InProcessClient:
    """A client that scores with an engine, and records its queries."""

    def __init__(self, engine: HfEngine) -> None:
        self._engine = engine
        self.queries: list[ScoreQuery] = []

    def submit(self, query: ScoreQuery) -> Future[RowBlock]:
        self.queries.append(query)
        [rows] = self._engine.score([query])
        assert isinstance(rows, RowBlock), rows
        if query.head_ids is not None:
            rows = replace(rows, head_ids=query.head_ids)
        return resolved(rows)


def teacher_of(
    teacher_model: Any, words: Any, path: Path, teacher_input: TeacherInput, **options: Any
) -> tuple[RemoteTeacher, InProcessClient]:
    engine = HfEngine(str(tiny.save(teacher_model, words, path)), device="cpu", dtype="float32")
    client: Any = InProcessClient(engine)
    settings: dict[str, Any] = {"top_k": None, "temperature": 1.3, "f32": True, **options}
    return RemoteTeacher(client, teacher_input=teacher_input, **settings), client


def assert_rows(actual: RowBlock, expected: RowBlock) -> None:
    assert actual.head_ids is not None
    assert expected.head_ids is not None
    np.testing.assert_array_equal(actual.head_ids, expected.head_ids)
    for name in ("head_logprobs", "tail_logmass", "token_logprobs", "draw_logprobs"):
        values, expected_values = getattr(actual, name), getattr(expected, name)
        assert (values is None) == (expected_values is None)
        if values is not None:
            np.testing.assert_allclose(values, expected_values, atol=2e-5)


def add_draws(rollout: Rollout) -> Rollout:
    """Return the rollout with draws outside its head."""
    head_ids = np.asarray(rollout.head_ids)
    ids = np.stack([np.setdiff1d(np.arange(13), row)[:3] for row in head_ids]).astype(np.int32)
    return replace(rollout, draws=TailDraws(torch.from_numpy(ids), torch.zeros(ids.shape)))


def test_rows_with_a_context_are_those_of_the_prompt_with_it(tmp_path: Path) -> None:
    words, teacher_model = tiny.tokenizer(), tiny.model(seed=1, layers=2)
    job = tiny.job(NO_MATERIAL, teacher__context="{hint}={answer}", data__template="{prompt}0")
    teacher_input = TeacherInput(teacher_prompt(job, words))
    teacher, client = teacher_of(teacher_model, words, tmp_path, teacher_input)
    oracle = ModelTeacher(teacher_model, temperature=1.3)
    for number, plain_rollout in enumerate(rollouts()):
        rollout = add_draws(plain_rollout)
        text = f"{number}+{number}={number}1+2=0"
        ids = torch.tensor(words(text)["input_ids"])
        handmade_rollout = replace(
            rollout, token_ids=torch.cat([ids, rollout.completion]), start=len(ids)
        )
        rows = teacher.score(rollout).result()
        assert_rows(rows, oracle.score(handmade_rollout).result())
        assert client.queries[-1].token_ids.tolist() == handmade_rollout.token_ids.tolist()
        plain_rows = oracle.score(rollout).result()
        assert np.abs(plain_rows.token_logprobs - rows.token_logprobs).max() > 1e-3


def test_a_prompt_that_is_too_long_for_the_teacher() -> None:
    job = tiny.job(NO_MATERIAL, teacher__context="{hint}=")
    prompt = teacher_prompt(job, tiny.tokenizer(), 8)
    with pytest.raises(InvalidInput, match="the teacher would read 9 tokens") as caught:
        prompt(rollouts(1)[0])
    assert caught.value.field == "teacher.context"
    words = tiny.tokenizer()
    bare = teacher_prompt(tiny.job(NO_MATERIAL), words, 3)
    with pytest.raises(InvalidInput, match="with its own prompt the teacher would") as caught:
        bare(rollouts(1)[0])
    assert caught.value.field == "method.max_prompt_tokens"


def test_the_arguments_of_the_teachers_template() -> None:
    words = tiny.tokenizer(CHARACTERS)
    words.chat_template = THINKING
    rollout = replace(rollouts(1)[0], fields={"m": TALK})

    def render_prompt(**changes: Any) -> str:
        job = tiny.job(NO_MATERIAL, data__messages_column="m", **changes)
        return str(words.decode(teacher_prompt(job, words)(rollout)))

    prompt_without_thinking = render_prompt()
    assert prompt_without_thinking.endswith("NA")
    assert render_prompt(
        teacher__template_arguments={"thinking": True}
    ) == prompt_without_thinking.replace("N", "")
    # Arguments of the student's template apply to the teacher's only if that reads them.
    assert render_prompt(
        data__template_arguments={"thinking": True, "other": 1}
    ) == prompt_without_thinking.replace("N", "")
    assert (
        render_prompt(data__template_arguments={"thinking": True}, teacher__template_arguments={})
        == prompt_without_thinking
    )
    job = tiny.job(NO_MATERIAL, teacher__template_arguments={"thinkin": True})
    with pytest.raises(InvalidInput, match="has no argument 'thinkin'") as caught:
        teacher_form(job, words)
    assert caught.value.field == "teacher.template_arguments"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Any, Any, Path]:
    """Tokenizers of a student and a teacher with the same characters and other special tokens."""
    student, teacher = tiny.tokenizer(CHARACTERS), tiny.tokenizer(CHARACTERS)
    student.add_special_tokens({"additional_special_tokens": ["<start>", "<stop>"]})
    student.eos_token = "<stop>"
    teacher.add_special_tokens({"additional_special_tokens": ["<User>", "<think>"]})
    student.chat_template = "{% for m in messages %}{{ m['content'] }}<stop>{% endfor %}A"
    teacher.chat_template = (
        "{% for m in messages %}<User>{{ m['content'] }}{{ eos_token }}{% endfor %}<think>"
    )
    path = tmp_path / "theirs"
    teacher.save_pretrained(path)
    return student, teacher, path


@pytest.mark.parametrize("forward", [False, True])
def test_rows_by_roles(pair: tuple[Any, Any, Path], tmp_path: Path, forward: bool) -> None:
    """Rows equal those of a teacher whose embeddings are permuted to the student's ids."""
    student, words, path = pair
    chosen_roles = {"<start>": "<think>"}
    job = tiny.job(NO_MATERIAL, teacher__tokenizer="auto", teacher__roles=chosen_roles)
    role_pair = compare_tokenizers(job, connected_teacher(str(path), words), student)
    assert isinstance(role_pair, SpecialTokenPair)
    end = str(words.eos_token)
    assert dict(role_pair.roles.pairs) == {"<stop>": end, "<start>": "<think>"}
    assert role_pair.tokens == vocabulary(student)
    size = len(student)
    ids = role_pair.ids(size + 3)
    assert ids[size:].tolist() == [size, size + 1, size + 2]

    torch.manual_seed(0)
    from student_trainer.tools.pretrain import make_model

    teacher_model = make_model(size, words, 2, 32).eval()
    with torch.no_grad():
        teacher_model.get_input_embeddings().weight.normal_(std=0.5)
    options = {"top_k": 5, "tail_samples": 4, "vocab_size": None} if forward else {}
    teacher_input = TeacherInput(teacher_prompt(job, role_pair.tokenizer), role_pair.ids(size))
    teacher, client = teacher_of(teacher_model, words, tmp_path / "model", teacher_input, **options)
    answer = torch.tensor([*student("12")["input_ids"], student.eos_token_id])
    heads = torch.tensor([[size - 1, 0, 5], [3, size - 2, 7], [size - 1, size - 2, size - 3]])
    rollout = replace(
        rollouts(1)[0],
        token_ids=torch.cat([torch.tensor(student("1+2=")["input_ids"]), answer]),
        start=4,
        head_ids=heads.int(),
        token_logprobs=torch.zeros(3),
    )
    rows = teacher.score(rollout).result()
    text = words.decode(client.queries[0].token_ids)
    assert text == f"<User>1+2={end}<think>12{end}"
    # The oracle: the same weights with rows in the student's order, which reads the student's ids.
    student_order_model = make_model(size, words, 2, 32).eval()
    student_order_model.load_state_dict(teacher_model.state_dict())
    order = torch.from_numpy(role_pair.ids(size)).long()
    with torch.no_grad():
        student_order_model.get_input_embeddings().weight.copy_(
            teacher_model.get_input_embeddings().weight[order]
        )
    student_ids = torch.argsort(order)
    prompt_ids = student_ids[torch.tensor(words(f"<User>1+2={end}<think>")["input_ids"])]
    oracle_rollout = replace(
        rollout, token_ids=torch.cat([prompt_ids, answer]), start=len(prompt_ids)
    )
    oracle = ModelTeacher(student_order_model, temperature=1.3, top_k=5 if forward else 0)
    expected_rows = oracle.score(oracle_rollout).result()
    if not forward:
        assert_rows(rows, expected_rows)
        return
    assert rows.head_ids is not None
    assert expected_rows.head_ids is not None
    assert np.sort(rows.head_ids).tolist() == np.sort(expected_rows.head_ids).tolist()
    np.testing.assert_allclose(rows.token_logprobs, expected_rows.token_logprobs, atol=2e-5)
    assert rows.tail_sample_ids is not None
    assert not any(
        set(head) & set(tail)
        for head, tail in zip(rows.head_ids.tolist(), rows.tail_sample_ids.tolist(), strict=True)
    )


def test_the_horizon_is_refused(pair: tuple[Any, Any, Path]) -> None:
    student, words, path = pair
    job = tiny.job(NO_MATERIAL, teacher__tokenizer="auto", method__horizon="answer")
    for teacher_words, message in (
        (words, "differ in special tokens only"),
        (student, "the student's token"),
    ):
        with pytest.raises(InvalidInput, match=message) as caught:
            compare_tokenizers(job, connected_teacher(str(path), teacher_words), student)
        assert caught.value.field == "method.horizon"


def test_text_without_a_role_is_aligned(pair: tuple[Any, Any, Path], tmp_path: Path) -> None:
    student, words, _ = pair
    words.add_tokens(["</t>"])  # it stands for text
    path = str(tmp_path / "more")
    words.save_pretrained(path)

    def find_pair(**changes: Any) -> Any:
        job = tiny.job(NO_MATERIAL, teacher__tokenizer="auto", **changes)
        return compare_tokenizers(job, connected_teacher(path, words), student)

    assert not isinstance(find_pair(), SpecialTokenPair)
    assert isinstance(find_pair(teacher__roles={"<start>": "</t>"}), SpecialTokenPair)
    other_words = tiny.tokenizer("0123456789+=xyz")
    other_words.save_pretrained(path)
    job = tiny.job(NO_MATERIAL, teacher__tokenizer="auto", teacher__roles={"<start>": "</t>"})
    with pytest.raises(InvalidInput, match="differ in more than special tokens") as caught:
        compare_tokenizers(job, connected_teacher(path, other_words), student)
    assert caught.value.field == "teacher.roles"
