"""Generated prompts: reproducible, and disjoint from the held-out ones."""

from __future__ import annotations

import random

import pytest

from protos.errors import InvalidInput
from student_trainer.rewards.reasoning_gym import Task, TaskQuestions
from student_trainer.rewards.sample import RewardSample

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def sums() -> Task:
    """Sums of two digits: a few hundred questions, so that training often meets held-out ones."""
    return Task("chain_sum", SUMS)


def test_steps_are_the_same_whatever_ran_before(sums: Task) -> None:
    questions = TaskQuestions(sums, seed=3, held_out=8)
    random.random()  # some tasks of the library use the global generator
    questions_of_step_7 = questions.of_step(7, 16)
    same_questions = TaskQuestions(Task("chain_sum", SUMS), seed=3, held_out=8)
    assert same_questions.of_step(7, 16) == questions_of_step_7
    assert same_questions.held_out == questions.held_out
    assert questions.of_step(1, 16) + questions.of_step(2, 16) == questions.of_step(1, 32)
    assert TaskQuestions(sums, seed=4, held_out=8).of_step(7, 16) != questions_of_step_7


def test_a_task_that_draws_from_the_global_generator_is_the_same_too() -> None:
    def read_questions() -> list[str]:
        random.seed(None)
        return [
            question.text for question in TaskQuestions(Task("list_functions", {}), 0, 4).held_out
        ]

    questions_before = read_questions()
    random.seed(5)
    state = random.getstate()
    Task("list_functions", {}).question(0, 1)
    assert random.getstate() == state
    assert read_questions() == questions_before


def test_held_out_questions_are_never_trained_on(sums: Task) -> None:
    questions = TaskQuestions(sums, seed=0, held_out=100)
    held_out = [question.text for question in questions.held_out]
    assert len(set(held_out)) == 100
    trained_texts = {question.text for question in questions.of_step(1, 500)}
    assert trained_texts.isdisjoint(held_out)
    index = questions.held_out[0].fields["index"]
    raw_texts = {sums.question(0, (1 << 20) + number).text for number in range(500)}
    assert not raw_texts.isdisjoint(held_out), f"the test sees nothing: from index {index}"


def test_a_task_that_is_too_small_is_refused(sums: Task) -> None:
    with pytest.raises(InvalidInput, match="does not generate 300 different prompts to hold out"):
        TaskQuestions(sums, seed=0, held_out=300)
    everything = TaskQuestions(sums, seed=0, held_out=8, fits=lambda text: True)
    only = everything.held_out[0].text
    with pytest.raises(InvalidInput, match="does not generate a prompt that is not held out"):
        TaskQuestions(sums, seed=0, held_out=1, fits=lambda text: text == only).of_step(1, 1)


def test_its_own_scorer_judges(sums: Task) -> None:
    question = TaskQuestions(sums, seed=0, held_out=1).held_out[0]

    def score(text: str) -> float:
        return sums.score(RewardSample(question.text, text, fields=question.fields))

    right, wrong = question.answer, str(int(question.answer) + 1000)
    assert score(right) == score(f"I think {wrong}, no: #### {right}") == 1
    assert score(f"{wrong} or <answer> {right} </answer>, not {wrong}") == 1
    assert score(f"<answer>{wrong}</answer> {right}") < 1
    assert score("") == 0


def test_commas_of_an_answer_are_its_own() -> None:
    task = Task("number_sorting", {})
    for question in TaskQuestions(task, seed=0, held_out=8).held_out:
        assert task.score(RewardSample(question.text, question.answer, fields=question.fields)) == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "chain_sums",
            {},
            r"^reward.type: reasoning-gym has no task 'chain_sums'; use one of .*chain",
        ),
        ("chain_sum", {"terms": 3}, r"^reward.options: .*unexpected keyword argument 'terms'"),
        ("chain_sum", {"min_terms": -1}, r"^reward.options: .*min_terms"),
    ],
)
def test_what_the_library_does_not_have(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Task(name, options)
