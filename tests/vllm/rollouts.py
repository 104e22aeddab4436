"""What the tests of the vllm rollout engine share: students, snapshots, orders, exact oracles."""

from __future__ import annotations

import asyncio
import copy
import gc
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from clients.config.tables.common import LoraConfig, StudentConfig
from student_trainer.checkpoints.export import write_adapters
from student_trainer.model.loading import load_model
from student_trainer.model.lora import trainable_weights
from student_trainer.rollout_client.order import (
    InFlight,
    Order,
    SamplingSettings,
    SequenceRequest,
    WeightsVersion,
)
from student_trainer.rollout_client.snapshot import Probe, seal
from student_trainer.rollout_service.engines.vllm import VllmRolloutEngine
from student_trainer.rollouts.sampler import SampledTokens, Sampler, rollout_noise
from tests.vllm.model import VOCAB_SIZE, save_model

_T = TypeVar("_T")

END_IDS = list(range(7, VOCAB_SIZE, 60))  # about every 60th sampled token is one
RANK = 3
# Rounding of float32 in two programs: of a log-prob in nats, and of a cumulative probability.
NATS, PROBABILITY = 1e-4, 1e-5


class Student:
    """A random student in `path`, whose weights the test changes, and its snapshots."""

    def __init__(
        self, path: Path, *, tied: bool = False, ends: Sequence[int] = END_IDS, **sizes: int
    ) -> None:
        # Tied weights give large logits to the tokens that were read, unless they are small.
        self.path = save_model(path / "model", tied=tied, std=0.15 if tied else 0.5, **sizes)
        GenerationConfig(eos_token_id=list(ends) or None).save_pretrained(self.path)
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.number = 0
        self._folder = path

    @torch.no_grad()
    def learn(self) -> None:
        """Change all weights, by so much that most sampled sequences become others."""
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        for weight in self.model.parameters():
            change = torch.randn(weight.shape, generator=generator)
            weight += 0.1 * weight.std().nan_to_num(0.1) * change

    def frozen(self) -> Student:
        """A student that keeps the present weights."""
        frozen_student = copy.copy(self)
        frozen_student.model = copy.deepcopy(self.model)
        return frozen_student

    def snapshot(self, in_flight: InFlight = "drain") -> WeightsVersion:
        """Write the present weights and their probe."""
        directory = self._folder / f"version-{self.number}"
        if not directory.exists():
            directory.mkdir()
            self.write(directory)
            seal(directory, number=self.number, dtype="float32", probe=self.probe())
        return WeightsVersion("lineage", self.number, directory, in_flight)

    def write(self, directory: Path) -> None:
        save_file(self.weights(), directory / "model.safetensors")

    def weights(self) -> dict[str, Tensor]:
        """The present weights; a head that is tied to the embeddings is left out, as on disk."""
        state_dict = dict(self.model.state_dict())
        if self.model.config.tie_word_embeddings:
            del state_dict["lm_head.weight"]
        return state_dict

    @torch.no_grad()
    def probe(self) -> Probe:
        generator = torch.Generator().manual_seed(self.number)
        ids = torch.randint(0, self.model.config.vocab_size, (3, 40), generator=generator)
        logprobs = self.model(ids).logits[:, :-1].log_softmax(-1)
        return Probe(ids, logprobs.gather(2, ids[:, 1:, None])[..., 0])

    @torch.no_grad()
    def logits(self, token_ids: Tensor) -> Tensor:
        """The logits [T, V] float64 of a full pass over token ids [T]."""
        logits: Tensor = self.model(token_ids[None]).logits[0].double()
        return logits

    def written(self, order: Order) -> list[SampledTokens]:
        """What the sampler of transformers makes of an order, in one batch."""
        settings = order.settings
        sampler = Sampler(
            self.model,
            self.tokenizer,
            top_k=settings.top_k,
            temperature=settings.temperature,
            draws=settings.draws,
            vocab_size=settings.vocab_size,
        )
        noise = draw_noise = None
        if settings.seed is not None:
            noise, draw_noise = (
                [numbers_of(settings, sequence, draws=draws) for sequence in order.sequences]
                for draws in (False, True)
            )
        limits = [sequence.limit for sequence in order.sequences]
        before = [sequence.token_ids for sequence in order.sequences]
        return sampler.write(before, limits, noise, draw_noise=draw_noise)


class AdaptedStudent(Student):
    """A student that learns adapters of rank RANK; its snapshots have them alone."""

    def __init__(self, path: Path, **sizes: int) -> None:
        super().__init__(path, **sizes)
        lora = LoraConfig(rank=RANK, alpha=5.0)
        self.model = load_model(StudentConfig(model=str(self.path), lora=lora)).eval()

    @torch.no_grad()
    def learn(self) -> None:
        """Change the adapters, by so much that most sampled sequences become others."""
        self.number += 1
        torch.manual_seed(self.number)
        for name, weight in trainable_weights(self.model).items():
            if ".lora_B." in name:
                weight.normal_(std=0.1)

    def write(self, directory: Path) -> None:
        write_adapters(directory, self.model, trainable_weights(self.model))


def numbers_of(settings: SamplingSettings, sequence: SequenceRequest, *, draws: bool) -> Tensor:
    assert settings.seed is not None
    stream = rollout_noise(sequence.number, settings.seed, settings.stream_tokens, draws=draws)
    return stream[sequence.used : sequence.used + sequence.limit]


SETTINGS = SamplingSettings(
    top_k=8, temperature=0.9, draws=4, seed=3, stream_tokens=1000, batch_tokens=10**6
)


def prompts(count: int, longest: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator) for n in lengths]


def order_of(
    version: WeightsVersion,
    before: Sequence[Tensor],
    limits: int | Sequence[int] = 64,
    settings: SamplingSettings = SETTINGS,
    first: int = 0,
) -> Order:
    """An order of sequences with the rollout numbers `first`, `first` + 1, ..."""
    sequence_limits = [limits] * len(before) if isinstance(limits, int) else limits
    return Order(
        version,
        settings,
        [
            SequenceRequest(ids, first + number, limit)
            for number, (ids, limit) in enumerate(zip(before, sequence_limits, strict=True))
        ],
    )


class Service:
    """An engine and the event loop that calls it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self.engine = VllmRolloutEngine(str(path), **{"max_batch_tokens": 512, **options})

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._runner.run(work)

    def load(self, version: WeightsVersion) -> None:
        self.run(self.engine.load(version))

    def sample(self, *orders: Order) -> list[list[SampledTokens]]:
        """Sample orders at the same time."""

        async def sample_all() -> list[list[SampledTokens]]:
            return await asyncio.gather(*(sampled(self.engine, order) for order in orders))

        return self.run(sample_all())

    def close(self) -> None:
        self.run(self.engine.close())
        self._runner.close()
        # vLLM leaves its sockets' contexts to the garbage collector, which warns.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del self.engine
            gc.collect()


async def sampled(engine: VllmRolloutEngine, order: Order) -> list[SampledTokens]:
    tokens_by_index = {index: tokens async for index, tokens in engine.sample(order)}
    return [tokens_by_index[index] for index in range(len(order.sequences))]


@dataclass(frozen=True)
class Inverse:
    """The inverse CDF of weights [V] float64."""

    weights: Tensor

    def gives(self, level: float, number: int) -> bool:
        """Whether it gives id `number` at a level in [0, 1), apart from rounding."""
        running = self.weights.cumsum(0) / self.weights.sum()
        start = 0.0 if number == 0 else float(running[number - 1])
        return start - PROBABILITY <= level <= float(running[number]) + PROBABILITY


def assert_sampled(
    sequence: SequenceRequest,
    settings: SamplingSettings,
    got: SampledTokens,
    logits: Tensor,
    ends: Sequence[int] = END_IDS,
) -> None:
    """Everything about a sequence against exact logits [L, V] float64 before each of its tokens."""
    length = len(got.token_ids)
    assert 1 <= length <= sequence.limit
    exact = (logits[:, : settings.vocab_size] / settings.temperature).log_softmax(1)
    chosen = exact.gather(1, got.token_ids[:, None])[:, 0]
    torch.testing.assert_close(got.token_logprobs.double(), chosen, rtol=0, atol=NATS)
    heads = exact.gather(1, got.head_ids.long())
    torch.testing.assert_close(heads, exact.topk(settings.top_k).values, rtol=0, atol=NATS)
    assert all(len(set(ids)) == settings.top_k for ids in got.head_ids.tolist())
    if settings.seed is None:
        assert got.draws is None
        torch.testing.assert_close(chosen, exact.max(1).values, rtol=0, atol=NATS)
    else:
        assert_drawn(sequence, settings, got, exact)
    closing = set(ends)
    assert not closing & set(got.token_ids[:-1].tolist())
    assert got.ended == (int(got.token_ids[-1]) in closing)
    assert got.ended or got.closed or length == sequence.limit


def assert_drawn(
    sequence: SequenceRequest, settings: SamplingSettings, got: SampledTokens, exact: Tensor
) -> None:
    """The tokens and the draws against inverse CDFs in float64 of log-probs [L, V]."""
    levels = numbers_of(settings, sequence, draws=False)
    draw_levels = numbers_of(settings, sequence, draws=True)
    for place, number in enumerate(got.token_ids.tolist()):
        weights = exact[place].exp()
        assert Inverse(weights).gives(float(levels[place]), number), place
        if settings.draws:
            assert got.draws is not None
            tail = weights.scatter(0, got.head_ids[place].long(), 0)
            draw_logprobs = got.draws[slice(place, place + 1)]
            for stratum, (token_id, logprob) in enumerate(
                zip(draw_logprobs.ids[0].tolist(), draw_logprobs.logprobs[0].tolist(), strict=True)
            ):
                level = (stratum + float(draw_levels[place])) / settings.draws
                assert Inverse(tail).gives(level, token_id), (place, stratum)
                assert abs(float((tail[token_id] / tail.sum()).log()) - logprob) < 10 * NATS


def exact_logits(
    students: Mapping[int, Student], sequence: SequenceRequest, got: SampledTokens
) -> Tensor:
    """The logits before each sampled token, of a full pass with the weights that sampled it."""
    all_token_ids = torch.cat([sequence.token_ids, got.token_ids[:-1]])
    first = len(sequence.token_ids) - 1
    parts, place = [], 0
    for version, count in got.versions:
        logits = students[version].logits(all_token_ids)[first:]
        parts.append(logits[place : place + count])
        place += count
    return torch.cat(parts)
