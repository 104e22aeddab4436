"""Rollouts: recorded log-probs, the sampled distribution, and reproducibility."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from clients.data.tokens.answers import end_ids
from student_trainer.checkpoints.export import export_model
from student_trainer.data.prompts import Prompt
from student_trainer.data.sequence import Rollout
from student_trainer.rollouts.rollouts import HuggingFaceRollouts
from student_trainer.rollouts.sampler import Sampler, rollout_noise
from tests.clients.data.test_prompt_format import BASE, BASE_ENDS, CHARACTERS, base_with_template
from tests.student_trainer import tiny
from tests.student_trainer.model_teacher import completion_logprobs

PROMPTS = [
    tiny.prompt(*ids, answer=str(number))
    for number, ids in enumerate([(1, 2), (3, 4, 5, 6, 7), (8,), (9, 10, 11), (12,)])
]


def make_rollouts(
    model: Any, *, top_k: int = 5, temperature: float = 1.0, new: int = 8, batch: int = 10_000
) -> HuggingFaceRollouts:
    return HuggingFaceRollouts(
        Sampler(model, tiny.tokenizer(), top_k=top_k, temperature=temperature),
        max_new_tokens=new,
        batch_tokens=batch,
    )


def generate_rollouts(
    rollouts: HuggingFaceRollouts, prompts: Sequence[Prompt], numbers: Sequence[int], **options: Any
) -> list[Rollout]:
    batches = rollouts.generate(prompts, numbers, **{"seed": 3, **options})
    return [rollout for batch in batches for rollout in batch]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_records_are_those_of_a_whole_forward_pass(student: Any, temperature: float) -> None:
    """Left padding, the KV cache and mixed lengths do not change records."""
    for rollout in generate_rollouts(
        make_rollouts(student, temperature=temperature), PROMPTS, range(5)
    ):
        exact = completion_logprobs(student, rollout, temperature)
        token = exact.gather(1, rollout.completion[:, None])[:, 0]
        torch.testing.assert_close(rollout.token_logprobs.double(), token, rtol=0, atol=1e-4)
        assert torch.equal(rollout.head_ids.long(), exact.topk(5).indices)
        assert rollout.head_ids.shape == (len(rollout.completion), 5)


def test_a_rollout_has_the_weight_of_its_prompt(student: Any) -> None:
    prompts = [replace(PROMPTS[0], weight=0.5), PROMPTS[1]]
    assert [
        rollout.weight for rollout in generate_rollouts(make_rollouts(student), prompts, range(2))
    ] == [0.5, 1.0]


def test_prompts_come_back_in_their_order(student: Any) -> None:
    for prompt, rollout in zip(
        PROMPTS, generate_rollouts(make_rollouts(student), PROMPTS, range(5)), strict=True
    ):
        assert rollout.token_ids[: rollout.start].tolist() == list(prompt.ids)
        assert rollout.answer == prompt.answer
        assert (rollout.token_ids.dtype, rollout.head_ids.dtype) == (torch.int64, torch.int32)


def test_neighbours_and_batches_do_not_matter(student: Any) -> None:
    numbers = [7, 2, 11, 5, 30]
    rollouts = generate_rollouts(make_rollouts(student), PROMPTS, numbers)
    single_rollouts = [
        generate_rollouts(make_rollouts(student), [prompt], [number])[0]
        for prompt, number in zip(PROMPTS, numbers, strict=True)
    ]
    small_batches = generate_rollouts(make_rollouts(student, batch=30), PROMPTS, numbers)
    backwards = generate_rollouts(make_rollouts(student), PROMPTS[::-1], numbers[::-1])[::-1]
    for variant in (single_rollouts, small_batches, backwards):
        for rollout, variant_rollout in zip(rollouts, variant, strict=True):
            assert rollout.token_ids.tolist() == variant_rollout.token_ids.tolist()


def test_batches_keep_to_their_size(student: Any) -> None:
    # The longest prompt has 5 tokens and gets 8 new ones: two sequences in 30 tokens.
    batches = list(make_rollouts(student, batch=30).generate(PROMPTS, range(5), seed=0))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [
        len(batch) for batch in make_rollouts(student, batch=1).generate(PROMPTS, range(5), seed=0)
    ]


def test_number_and_seed_decide(student: Any) -> None:
    prompt = [PROMPTS[0]] * 4
    first = [
        rollout.token_ids.tolist()
        for rollout in generate_rollouts(make_rollouts(student), prompt, range(4))
    ]
    repeated = [
        rollout.token_ids.tolist()
        for rollout in generate_rollouts(make_rollouts(student), prompt, range(4))
    ]
    other_seed = [
        rollout.token_ids.tolist()
        for rollout in generate_rollouts(make_rollouts(student), prompt, range(4), seed=4)
    ]
    assert first == repeated
    assert len({tuple(ids) for ids in first}) > 1
    assert first != other_seed


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_have_the_exact_distribution(student: Any, temperature: float) -> None:
    """Chi-square of 4,000 first tokens, each from the random stream of consecutive numbers."""
    count = 4000
    rollouts = make_rollouts(student, temperature=temperature, new=1, batch=10**6)
    counts = torch.zeros(len(tiny.tokenizer()), dtype=torch.float64)
    for rollout in generate_rollouts(rollouts, [PROMPTS[1]] * count, range(-200, count - 200)):
        counts[rollout.completion[0]] += 1
    ids = torch.tensor([*PROMPTS[1].ids, 0])
    rollout = Rollout(ids, len(ids) - 1, ids, ids, True, "")
    expected = completion_logprobs(student, rollout, temperature)[0].exp() * count
    is_frequent = expected >= 5  # rule of thumb of the chi-square test
    pooled_expected = torch.cat([expected[is_frequent], expected[~is_frequent].sum()[None]])
    pooled_counts = torch.cat([counts[is_frequent], counts[~is_frequent].sum()[None]])
    chi_square = float(
        ((pooled_counts - pooled_expected) ** 2 / pooled_expected.clamp(min=1e-9)).sum()
    )
    freedom = len(pooled_expected) - 1
    # Wilson and Hilferty: the cube root is close to normal; 4 standard deviations.
    limit = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


def test_answers_end_at_the_first_end(student: Any) -> None:
    end = tiny.tokenizer().eos_token_id
    rollouts = generate_rollouts(make_rollouts(student, new=20), [PROMPTS[0]] * 40, range(40))
    for rollout in rollouts:
        ends = (rollout.completion == end).nonzero().flatten().tolist()
        assert rollout.truncated == (not ends)
        if ends:
            assert ends == [len(rollout.completion) - 1]
        else:
            assert len(rollout.completion) == 20
        assert len(rollout.token_logprobs) == len(rollout.head_ids) == len(rollout.completion)
    assert {rollout.truncated for rollout in rollouts} == {True, False}


def test_ends_of_the_model_itself_count(student: Any) -> None:
    own = student.generation_config
    student.generation_config = GenerationConfig(eos_token_id=[3, 4])
    try:
        for rollout in generate_rollouts(
            make_rollouts(student, new=20), [PROMPTS[0]] * 20, range(20)
        ):
            last = int(rollout.completion[-1])
            assert rollout.truncated == (last not in (0, 3, 4))
            assert not {0, 3, 4} & set(rollout.completion[:-1].tolist())
    finally:
        student.generation_config = own


def test_a_generation_config_does_not_bend_the_samples(student: Any) -> None:
    expected = generate_rollouts(make_rollouts(student), PROMPTS, range(5))
    original_config = student.generation_config
    biased_config = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_p=0.2,
        top_k=2,
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
        eos_token_id=original_config.eos_token_id,
        max_new_tokens=2,
    )
    dict_before = biased_config.to_dict()
    student.generation_config = biased_config
    try:
        rollouts = generate_rollouts(make_rollouts(student), PROMPTS, range(5))
        assert student.generation_config is biased_config
        assert biased_config.to_dict() == dict_before
    finally:
        student.generation_config = original_config
    for expected_rollout, rollout in zip(expected, rollouts, strict=True):
        assert expected_rollout.token_ids.tolist() == rollout.token_ids.tolist()
        assert torch.equal(expected_rollout.token_logprobs, rollout.token_logprobs)


def test_greedy_takes_the_likeliest(student: Any) -> None:
    for rollout in generate_rollouts(
        make_rollouts(student, top_k=0), PROMPTS, range(5), greedy=True
    ):
        exact = completion_logprobs(student, rollout)
        assert rollout.completion.tolist() == exact.argmax(1).tolist()
        assert rollout.head_ids.shape == (len(rollout.completion), 0)


@pytest.mark.parametrize("draws", [0, 3])
def test_padding_is_never_sampled(draws: int) -> None:
    """Samples are bit-identical to those of a model without padding ids, whatever their mass."""
    narrow_model, wide_model = tiny.model(seed=2), tiny.model(seed=2)
    wide_model.resize_token_embeddings(16, mean_resizing=False)
    with torch.no_grad():
        wide_model.get_input_embeddings().weight[13:].normal_(std=3.0)
    wide_rollouts, narrow_rollouts = (
        generate_rollouts(
            HuggingFaceRollouts(
                Sampler(
                    model,
                    tiny.tokenizer(),
                    top_k=5,
                    temperature=1.2,
                    draws=draws,
                    vocab_size=vocab_size,
                ),
                max_new_tokens=8,
                batch_tokens=10_000,
            ),
            PROMPTS,
            range(5),
        )
        for model, vocab_size in ((wide_model, 13), (narrow_model, None))
    )
    for wide_rollout, narrow_rollout in zip(wide_rollouts, narrow_rollouts, strict=True):
        assert torch.equal(wide_rollout.token_ids, narrow_rollout.token_ids)
        assert torch.equal(wide_rollout.head_ids, narrow_rollout.head_ids)
        torch.testing.assert_close(wide_rollout.token_logprobs, narrow_rollout.token_logprobs)
        assert (wide_rollout.draws is None) == (narrow_rollout.draws is None) == (draws == 0)
        if wide_rollout.draws is not None and narrow_rollout.draws is not None:
            assert torch.equal(wide_rollout.draws.ids, narrow_rollout.draws.ids)
    padded_rollouts = generate_rollouts(make_rollouts(wide_model), PROMPTS, range(5))
    # Without the limit, padding ids are likely.
    assert any(bool((rollout.head_ids >= 13).any()) for rollout in padded_rollouts)


def test_a_pad_token_without_an_embedding(words: Any) -> None:
    """As `add_special_tokens({"pad_token": ...})` leaves it, without a resized model."""
    model = tiny.model(seed=2, spread=0.2)
    padded = tiny.tokenizer()
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert padded.pad_token_id >= model.config.vocab_size
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    noise = [rollout_noise(number, 0, 8) for number in range(2)]

    def sample_ids(tokenizer: Any) -> list[list[int]]:
        sampler = Sampler(model, tokenizer, top_k=2, temperature=1.0)
        return [answer.token_ids.tolist() for answer in sampler.write(prompts, [8, 2], noise)]

    assert sample_ids(padded) == sample_ids(words)


def test_rollouts_end_where_the_chat_template_ends_answers() -> None:
    """Whatever the tokenizer's own end is; the export names both for the server of the model."""
    words = base_with_template()
    model = tiny.model(characters=CHARACTERS + BASE_ENDS, seed=2, spread=0.2)
    (turn,) = words(BASE_ENDS, add_special_tokens=False)["input_ids"]
    assert end_ids(model.generation_config, words) == sorted([turn, words.eos_token_id])
    sampler = Sampler(model, words, top_k=0, temperature=1.0)
    prompts = [torch.tensor([number % 5 + 1]) for number in range(64)]
    noise = [rollout_noise(number, 0, 40) for number in range(64)]
    answers = sampler.write(prompts, [40] * 64, noise)
    at_turn = [answer for answer in answers if int(answer.token_ids[-1]) == turn]
    assert len(at_turn) > 5, "by chance, a random model ends about half of them so"
    for answer in answers:
        assert not torch.isin(answer.token_ids[:-1], torch.tensor([turn, words.eos_token_id])).any()
        assert answer.ended == (int(answer.token_ids[-1]) in (turn, words.eos_token_id))


def test_the_export_names_all_ends(tmp_path: Path) -> None:
    words = base_with_template()
    model = tiny.model(characters=CHARACTERS + BASE_ENDS)
    export_model(tmp_path / "export", model=model, tokenizer=words)
    stored = GenerationConfig.from_pretrained(tmp_path / "export")
    assert stored.eos_token_id == end_ids(model.generation_config, words)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == BASE
