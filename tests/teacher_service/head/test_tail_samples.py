"""What the teacher draws from its tail: in exact shares, the same for whoever asks, and worth an
unbiased loss. Nothing here is statistics: the sampler is a step function, and its steps are found.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.teacher.pending_answer import RowAssembly
from clients.teacher.query import MAX_TAIL_SAMPLES, ScoreQuery
from protos.errors import Corrupt
from protos.rows.codec import RowBlock, decode_rows, encode_rows
from student_trainer.losses import Rows, exact_kl, rows_from_logits, topk_kl
from teacher_service.cache.row_cache import EncodedRows
from teacher_service.engines.fake import FakeEngine, FakeSettings
from teacher_service.engines.hf import HfEngine
from teacher_service.head.scoring import ScoredRows, score_hidden
from teacher_service.head.tail_samples import draw
from teacher_service.head.uniforms import uniforms_of
from teacher_service.serving.scorer import RowAnswer, split_into_chunks
from tests.teacher_service.tiny_model import VOCAB_SIZE


def steps(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where the interval of each of ids [n, M] begins and ends: `draw` rises with its number."""

    def first(reached: Tensor) -> Tensor:
        low, high = torch.zeros(ids.shape).double(), torch.ones(ids.shape).double()
        for _ in range(60):
            middle = (low + high) / 2
            beyond = draw(weights, middle) >= reached
            low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
        return high

    return first(ids), first(ids + 1)


def some_weights(vocab: int, *, seed: int = 0) -> Tensor:
    """float32 [4, V] over nine orders of magnitude, a third of them 0; one row ends in zeros."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.rand(4, vocab, generator=generator) * -20).exp()
    weights[torch.rand(4, vocab, generator=generator) < 0.3] = 0
    weights[1, : vocab // 2] = 0
    weights[2, -(vocab // 2) :] = 0
    weights[:, vocab // 2] = 0.5
    return weights


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 150])
def test_every_id_has_its_share(vocab: int) -> None:
    weights = some_weights(vocab)
    begins, ends = steps(weights, torch.arange(vocab).expand(4, -1))
    exact = weights.double() / weights.double().sum(1, keepdim=True)
    assert torch.equal(ends[weights == 0], begins[weights == 0])  # never drawn
    torch.testing.assert_close(ends - begins, exact, rtol=2e-6, atol=1e-15)


def test_the_unlikely_among_very_many() -> None:
    """151,936 ids: a float32 running sum would give most of these a share of zero."""
    generator = torch.Generator().manual_seed(0)
    weights = (6 * torch.randn(2, 151_936, generator=generator)).exp()
    order = weights.argsort(1)
    ids = order[:, [9_000, 50_000, 100_000, 150_000, 151_935]]
    begins, ends = steps(weights, ids)
    exact = (weights.double() / weights.double().sum(1, keepdim=True)).gather(1, ids)
    assert exact.min() < 1e-11
    torch.testing.assert_close(ends - begins, exact, rtol=2e-5, atol=1e-15)


def test_the_first_and_the_last_number() -> None:
    weights = some_weights(1000)
    sample_ids = draw(weights, torch.tensor([[0.0, 1 - 2.0**-53]]).double().expand(4, 2))
    places = torch.arange(1000).expand(4, -1)
    is_positive = weights > 0
    assert sample_ids[:, 0].tolist() == places.masked_fill(~is_positive, 1000).amin(1).tolist()
    assert sample_ids[:, 1].tolist() == places.masked_fill(~is_positive, -1).amax(1).tolist()


def score(
    logits: Tensor,
    uniforms: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    head: Tensor | None = None,
) -> ScoredRows:
    """Any logits, -inf included: as the bias of a row scored alone."""
    rows = [
        score_hidden(
            torch.zeros(1, 1),
            torch.zeros(logits.shape[1], 1),
            bias=logits[row],
            token_ids=torch.zeros(1, dtype=torch.long),
            top_k=None if head is not None else k,
            head_ids=None if head is None else head[row, None],
            temperature=temperature,
            uniforms=uniforms[row, None],
        )
        for row in range(len(logits))
    ]
    columns = [[getattr(row, column.name) for row in rows] for column in fields(ScoredRows)]
    return ScoredRows(*(None if tensors[0] is None else torch.cat(tensors) for tensors in columns))


def grid(rows: int, count: int) -> Tensor:
    return ((torch.arange(count).double() + 0.5) / count).expand(rows, -1)


@pytest.mark.parametrize(("k", "by_student"), [(0, False), (1, False), (7, False), (7, True)])
def test_frequencies_on_a_grid_are_the_tails(k: int, by_student: bool) -> None:
    """Counts of 20,000 numbers at equal distances are off by less than the two at the ends."""
    logits = 2 * torch.randn(3, 150, generator=torch.Generator().manual_seed(k))
    logits[:, 100:120] = -torch.inf
    head = torch.arange(k).expand(3, -1) * 3 if by_student else None
    count, temperature = 20_000, 1.5
    scored = score(logits, grid(3, count), k, temperature=temperature, head=head)
    assert scored.sample_ids is not None
    assert scored.sample_logprob is not None
    exact = (logits.double() / temperature).log_softmax(1)
    tail = exact.scatter(1, scored.head_ids, -torch.inf)
    shares = tail.softmax(1)
    frequencies = torch.stack([row.bincount(minlength=150) for row in scored.sample_ids]) / count
    assert frequencies[shares == 0].sum() == 0
    torch.testing.assert_close(frequencies.double(), shares, rtol=0, atol=2 / count)
    mean = exact.gather(1, scored.sample_ids).mean(1)
    torch.testing.assert_close(scored.sample_logprob.double(), mean, rtol=1e-6, atol=1e-5)


def test_nothing_else_of_a_row_changes() -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0))
    plain = score_hidden(
        logits,
        torch.eye(300),
        token_ids=torch.arange(9),
        top_k=5,
        head_ids=None,
        temperature=1.0,
    )
    sampled = score_hidden(
        logits,
        torch.eye(300),
        token_ids=torch.arange(9),
        top_k=5,
        head_ids=None,
        temperature=1.0,
        uniforms=grid(9, 3),
        chunk_rows=2,
    )
    for name in ("head_ids", "head_logprobs", "tail_logmass", "token_logprobs"):
        assert torch.equal(getattr(plain, name), getattr(sampled, name))
    assert plain.sample_ids is None


def test_a_head_with_all_the_mass_draws_nothing_that_counts() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    logits[1, 5:] = -torch.inf
    scored = score(logits, grid(2, 4), 30)
    assert scored.sample_ids is not None
    assert scored.sample_logprob is not None
    assert bool(((scored.sample_ids >= 0) & (scored.sample_ids < 30)).all())
    assert scored.sample_logprob.isneginf().all()
    student = torch.randn(2, 30, requires_grad=True)
    rows = rows_from_logits(
        student, scored.head_ids, torch.zeros(2, dtype=torch.long), sample_ids=scored.sample_ids
    )
    teacher = Rows(
        scored.head_logprobs,
        scored.tail_logmass,
        scored.token_logprobs,
        scored.sample_logprob[:, None],
    )
    loss = topk_kl(
        rows,
        teacher,
        torch.ones(2, dtype=torch.bool),
        direction="forward",
        tail="bucket+teacher_samples",
    )
    torch.testing.assert_close(loss[0], exact_kl(student, logits, direction="forward")[0])
    loss.sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_bad_logits_are_refused_as_without_samples() -> None:
    logits = torch.zeros(3, 100)
    logits[1, 50] = torch.nan
    with pytest.raises(Corrupt, match="position 0"):
        score(logits, grid(3, 2), 4)


def shipped(scored: ScoredRows, *, f32: bool) -> tuple[Rows, Tensor, Tensor]:
    """The rows as a student reads them, in float64: with head ids and sample ids."""
    assert scored.sample_ids is not None
    assert scored.sample_logprob is not None
    block = RowBlock(
        scored.head_ids.to(torch.int32).numpy(),
        scored.head_logprobs.numpy(),
        scored.tail_logmass.numpy(),
        scored.token_logprobs.numpy(),
        scored.sample_ids.to(torch.int32).numpy(),
        scored.sample_logprob.numpy(),
    )
    read = decode_rows(encode_rows(block, f32=f32), 1 << 20)
    assert read.head_ids is not None
    assert read.tail_sample_ids is not None
    assert read.tail_sample_logprob is not None
    floats = (
        torch.from_numpy(column.astype(np.float64))
        for column in (read.head_logprobs, read.tail_logmass, read.token_logprobs)
    )
    mean = torch.from_numpy(read.tail_sample_logprob.astype(np.float64))[:, None]
    ids = (read.head_ids, read.tail_sample_ids)
    heads, samples = (torch.from_numpy(id_array.astype(np.int64)) for id_array in ids)
    return Rows(*floats, mean), heads, samples


@pytest.mark.parametrize("f32", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_what_is_shipped_makes_an_unbiased_loss(k: int, f32: bool) -> None:
    """The expectation over the teacher's own sampler, each id weighed by its interval, of value and
    gradient: the exact KL, up to the rounding of the head's log-probs (f16: 5e-4 of each).
    """
    vocab = 80
    generator = torch.Generator().manual_seed(1)
    teacher = 2 * torch.randn(vocab, generator=generator)
    student = 2 * torch.randn(vocab, dtype=torch.float64, generator=generator)
    student.requires_grad_()
    exact = exact_kl(student[None], teacher.double()[None], direction="forward")[0]
    (gradient,) = torch.autograd.grad(exact, student)

    head = teacher.topk(k).indices
    # The weights as `score_hidden` makes them.
    tail = teacher[None].scatter(1, head[None], -torch.inf)
    begins, ends = steps((tail - tail.max()).exp(), torch.arange(vocab)[None])
    is_drawn = (ends > begins)[0]
    middles, shares = ((begins + ends) / 2)[0, is_drawn], (ends - begins)[0, is_drawn]
    assert int(is_drawn.sum()) == vocab - k
    assert abs(float(shares.sum()) - 1) < 1e-12

    n = len(middles)
    read, heads, samples = shipped(score(teacher.expand(n, -1), middles[:, None], k), f32=f32)
    assert torch.equal(samples[:, 0], torch.arange(vocab)[is_drawn])
    rows = rows_from_logits(
        student.expand(n, -1), heads, torch.zeros(n, dtype=torch.long), sample_ids=samples
    )
    losses = topk_kl(
        rows,
        read,
        torch.zeros(n, dtype=torch.bool),
        direction="forward",
        tail="bucket+teacher_samples",
    )
    expected = (shares * losses).sum()
    (mean_gradient,) = torch.autograd.grad(expected, student)
    tolerance = 1e-5 if f32 or not k else 2e-3
    torch.testing.assert_close(expected, exact, rtol=0, atol=tolerance)
    torch.testing.assert_close(mean_gradient, gradient, rtol=0, atol=tolerance)
    # Not what one gets without the samples.
    bucket = topk_kl(
        rows, read, torch.zeros(n, dtype=torch.bool), direction="forward", tail="bucket"
    )
    assert bool(bucket[0] < exact - 0.1)


def query(length: int = 40, start: int = 1, *, seed: int = 7, samples: int = 12) -> ScoreQuery:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, length).astype(np.int32)
    return ScoreQuery(tokens, start, top_k=4, tail_samples=samples, seed=seed)


def test_numbers_depend_on_seed_and_prefix_alone() -> None:
    all_uniforms = uniforms_of(query())
    assert all_uniforms.shape == (39, 12)
    assert all_uniforms.min() >= 0
    assert all_uniforms.max() < 1
    assert len(np.unique(all_uniforms)) == all_uniforms.size
    np.testing.assert_array_equal(uniforms_of(query(start=17)), all_uniforms[16:])
    cut = replace(query(), token_ids=query().token_ids[:20])
    np.testing.assert_array_equal(uniforms_of(cut), all_uniforms[:19])
    np.testing.assert_array_equal(uniforms_of(query(samples=3)), all_uniforms[:, :3])
    changed = query()
    changed.token_ids[9] += 1  # row t has seen tokens 0..t-1
    changed_uniforms = uniforms_of(changed)
    np.testing.assert_array_equal(changed_uniforms[:9], all_uniforms[:9])
    assert not np.isin(changed_uniforms[9:], all_uniforms).any()
    for seed in (0, 8, 2**64 - 1):
        assert not np.isin(uniforms_of(query(seed=seed)), all_uniforms).any()


def test_numbers_are_spread_evenly() -> None:
    """48,000 numbers into 16 cells of each pair of neighbours: chi-square, of a fixed seed."""
    numbers = uniforms_of(query(4001))
    for first_numbers, second_numbers in (
        (numbers[:, :-1], numbers[:, 1:]),  # of one row
        (numbers[:-1], numbers[1:]),  # of two rows
    ):
        cells = (4 * first_numbers).astype(int) * 4 + (4 * second_numbers).astype(int)
        counts = np.bincount(cells.reshape(-1), minlength=16)
        expected = counts.sum() / 16
        # 37.7 is exceeded once in a thousand times by chance.
        assert ((counts - expected) ** 2 / expected).sum() < 37.7


def sampled(engine: HfEngine | FakeEngine, queries: list[ScoreQuery]) -> list[RowBlock]:
    answers = engine.score(queries)
    assert all(isinstance(answer, RowBlock) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, RowBlock)]


@pytest.fixture(scope="module", params=["hf", "fake"])
def engine(request: pytest.FixtureRequest, tiny_model: Path) -> HfEngine | FakeEngine:
    if request.param == "fake":
        return FakeEngine(FakeSettings(vocab=VOCAB_SIZE))
    return HfEngine(str(tiny_model), device="cpu")


def test_the_same_for_whoever_asks(engine: HfEngine | FakeEngine) -> None:
    """In any company, from any start, in any cut; no head id among them."""
    full_rows = sampled(engine, [query()])[0]
    assert full_rows.head_ids is not None
    assert full_rows.tail_sample_ids is not None
    assert full_rows.tail_sample_ids.shape == (39, 12)
    assert not (full_rows.tail_sample_ids[:, :, None] == full_rows.head_ids[:, None]).any()
    shorter = replace(query(), token_ids=query().token_ids[:25])
    company = [query(90, 3, seed=1), query(start=13), query(5), shorter, query(samples=0)]
    parts = sampled(engine, company)
    np.testing.assert_array_equal(parts[1].tail_sample_ids, full_rows.tail_sample_ids[12:])
    np.testing.assert_array_equal(parts[3].tail_sample_ids, full_rows.tail_sample_ids[:24])
    assert parts[4].tail_sample_ids is None
    other_ids = sampled(engine, [query(seed=8)])[0].tail_sample_ids
    assert other_ids is not None
    assert (other_ids != full_rows.tail_sample_ids).mean() > 0.5


def answer(score_query: ScoreQuery) -> RowAnswer:
    """By an engine that has just been started."""
    block = sampled(FakeEngine(FakeSettings(vocab=VOCAB_SIZE)), [score_query])[0]
    return RowAnswer(EncodedRows(encode_rows(block, f32=True), block), version=0)


def test_an_answer_that_breaks_off_goes_on_with_the_same_samples() -> None:
    """Half of it comes from one life of the teacher, half from the next."""
    score_query = replace(query(3000, 9, samples=MAX_TAIL_SAMPLES), f32=True)
    assembly = RowAssembly(score_query)
    first, *lost = split_into_chunks(answer(score_query), score_query, "1", 0)
    assert lost
    assert assembly.add(first, VOCAB_SIZE) is None
    assert assembly.resume_position == 9 + first.count
    assembled_rows = None
    for chunk in split_into_chunks(answer(score_query), score_query, "2", assembly.resume_position):
        assert assembly.continues(chunk)
        assembled_rows = assembly.add(chunk, VOCAB_SIZE)
    undisturbed = answer(score_query).rows.block
    assert assembled_rows is not None
    for column in fields(RowBlock):
        row_column, expected = (
            getattr(assembled_rows, column.name),
            getattr(undisturbed, column.name),
        )
        np.testing.assert_array_equal(row_column, expected)
        assert row_column is None or row_column.flags.writeable


@pytest.mark.parametrize(
    ("requested_samples", "returned_samples", "message"),
    [
        (12, 0, "with tail_samples = 0 .* has tail_samples = 12"),
        (12, 11, "with tail_samples = 11 .* has tail_samples = 12"),
        (0, 1, "with tail_samples = 1 .* has tail_samples = 0"),
        (0, 12, "39 rows with k = 4 and 12 samples takes more than"),
    ],
)
def test_another_number_of_samples_than_asked_for_is_refused(
    requested_samples: int, returned_samples: int, message: str
) -> None:
    """As a teacher of an earlier version sends them: it does not know the field."""
    chunks = split_into_chunks(
        answer(query(samples=returned_samples)), query(samples=returned_samples), "1", 0
    )
    with pytest.raises(Corrupt, match=message):
        RowAssembly(query(samples=requested_samples)).add(next(chunks), VOCAB_SIZE)


def test_the_fake_engine_draws_from_its_tail() -> None:
    """Many more numbers than ids: each is drawn as often as its probability says, to 5 sigma."""
    tokens = np.array([3, 1], np.int32)
    engine = FakeEngine(FakeSettings(vocab=12))
    everything = sampled(engine, [ScoreQuery(tokens, 1, top_k=12, f32=True)])[0]
    rows = sampled(engine, [ScoreQuery(tokens, 1, top_k=2, tail_samples=5000)])[0]
    assert everything.head_ids is not None
    assert rows.tail_sample_ids is not None
    assert rows.tail_sample_logprob is not None
    logprobs = np.zeros(12)
    logprobs[everything.head_ids[0]] = everything.head_logprobs[0]
    shares = np.exp(logprobs)
    shares[rows.head_ids] = 0
    shares /= shares.sum()
    counts = np.bincount(rows.tail_sample_ids[0], minlength=12)
    assert (np.abs(counts - 5000 * shares) <= 5 * np.sqrt(5000 * shares)).all()
    mean = logprobs[rows.tail_sample_ids[0]].mean()
    np.testing.assert_allclose(rows.tail_sample_logprob[0], mean, rtol=1e-5)
