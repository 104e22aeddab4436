"""What a captured store holds, who may add to it, and how parts of it are joined."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.runs.directory import RunDirectory
from clients.store.checks import damages, summary_of
from clients.store.dataset import LogitDataset
from clients.store.merge import merge
from clients.store.sample import sample_of
from clients.teacher.query import ScoreQuery
from protos.errors import Corrupt, DistillError, InvalidInput, NotFound, WrongState
from protos.rows.codec import HEADER_BYTES, RowBlock, encode_rows
from teacher_service.engines.fake import FakeEngine, FakeSettings
from tests.teacher_service.capture.material import (
    END,
    VOCABULARY,
    capture_here,
    digests,
    job,
    pairs,
    save_words,
    text,
    write_lines,
    write_pairs,
)


@pytest.fixture
def copied(captured_store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(captured_store, tmp_path / "copied"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_sequence_in_the_order_of_the_data(captured_store: Path) -> None:
    stored = LogitDataset(captured_store)
    assert len(stored) == 100
    stored_pairs = [(item["input_ids"].tolist(), item["start"]) for item in stored]
    assert stored_pairs == [([*a, *b, END], len(a)) for a, b in pairs(100)]


def test_rows_are_the_models_own(tmp_path: Path) -> None:
    """Against transformers and a log_softmax of all logits."""
    import torch

    from tests.student_trainer import tiny

    torch.set_num_threads(1)
    model, temperature = tiny.model(seed=1), 1.5
    path = tiny.save(model, tiny.tokenizer(), tmp_path / "model")
    records = [([1, 2], [3, 4, 5]), ([6], [7]), ([8, 9, 10, 11], [12] * 9)]
    data = tmp_path / "data.jsonl"
    words = tiny.tokenizer()
    write_lines(data, [{"prompt": words.decode(a), "answer": words.decode(b)} for a, b in records])
    _, store = capture_here(
        tmp_path / "run",
        job(
            data,
            path,
            teacher__model=str(path),
            teacher__engine="hf",
            teacher__logprob_format="f32",
            method__temperature=temperature,
        ),
    )
    stored = LogitDataset(store)
    assert len(stored) == len(records)
    for item, (prompt, answer) in zip(stored, records, strict=True):
        ids = torch.tensor([[*prompt, *answer, words.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        expected = logits.double().log_softmax(1).numpy()
        top = np.argsort(-expected, 1)[:, :4]
        assert item["input_ids"].tolist() == ids[0].tolist()
        assert item["start"] == len(prompt)
        np.testing.assert_array_equal(item["head_ids"], top)
        head = np.take_along_axis(expected, top, 1)
        np.testing.assert_allclose(item["head_logprobs"], head, atol=1e-5)
        tokens = np.take_along_axis(expected, ids[0, len(prompt) :, None].numpy(), 1)[:, 0]
        np.testing.assert_allclose(item["token_logprobs"], tokens, atol=1e-5)
        tail = np.log(1 - np.exp(head).sum(1))
        np.testing.assert_allclose(item["tail_logmass"], tail, atol=1e-4)


@pytest.mark.parametrize("form", ["completion", "messages"])
def test_a_context_that_only_the_teacher_reads(words: Path, tmp_path: Path, form: str) -> None:
    """Stored prompts lack it; rows are those of the engine for prompts that have it, by hand."""
    from tests.teacher_service.capture.test_sequences import TEMPLATE

    token_pairs = pairs(30)
    if form == "completion":
        records = [{"prompt": text(a), "answer": text(b), "hint": "t9"} for a, b in token_pairs]
    else:
        shutil.copytree(words, words := tmp_path / "chat")
        (words / "chat_template.jinja").write_text(TEMPLATE)
        records = [
            {"messages": make_messages(text(a), text(b)), "hint": "t9"} for a, b in token_pairs
        ]
    data = write_lines(tmp_path / "data.jsonl", records)
    config = job(data, words, data__form=form, teacher__context="{hint} {answer} ")
    _, store = capture_here(tmp_path / "run", config)
    stored = LogitDataset(store)
    assert stored.metadata["context"] == '"{hint} {answer} "'
    engine = FakeEngine(FakeSettings(vocab=VOCABULARY))
    assert len(stored) == len(token_pairs)
    for item, (prompt, answer) in zip(stored, token_pairs, strict=True):
        before, prompt_ids = [9, *answer, *prompt], prompt
        if form == "messages":
            before, prompt_ids = [1, *before, 2], [1, *prompt, 2]
        scored = [*answer, END]
        assert item["input_ids"].tolist() == [*prompt_ids, *scored]
        assert item["start"] == len(prompt_ids)
        ids = np.array([*before, *scored], np.int32)
        [rows] = engine.score([ScoreQuery(ids, len(before), top_k=4)])
        assert isinstance(rows, RowBlock)
        np.testing.assert_array_equal(item["head_ids"], rows.head_ids)
        np.testing.assert_allclose(item["token_logprobs"], rows.token_logprobs, atol=1e-2)
    plain = job(data, words, data__form=form, method__store=str(store))
    with pytest.raises(WrongState, match="holds rows with"):
        capture_here(tmp_path / "again", plain)


def make_messages(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def test_a_context_that_makes_a_prompt_too_long(words: Path, tmp_path: Path) -> None:
    records = [{"prompt": text([1] * n), "answer": "t2", "hint": text([3] * 40)} for n in (5, 30)]
    data = write_lines(tmp_path / "data.jsonl", records)
    changes = {"teacher__context": "{hint} ", "data__max_left_out": 0.5}
    _, store = capture_here(tmp_path / "run", job(data, words, **changes))
    facts = LogitDataset(store).metadata
    assert (facts["sequences"], facts["too_long"]) == ("1", "1")
    with pytest.raises(InvalidInput, match="no column 'hints'"):
        capture_here(tmp_path / "2", job(data, words, teacher__context="{hints} "))


@pytest.mark.parametrize("compress", [False, True])
def test_samples_of_the_tail_and_no_head(
    data: Path, words: Path, tmp_path: Path, compress: bool
) -> None:
    """Rows of 39 bytes: those of the engine, which another seed would draw otherwise."""
    changes = {"teacher__top_k": 0, "method__tail_samples": 12, "method__compress": compress}
    config = job(data, words, method__store=str(tmp_path / "rows"), **changes)
    config = config.model_copy(update={"seed": 5})
    _, store = capture_here(tmp_path / "1", config)
    facts = LogitDataset(store).metadata
    assert (facts["top_k"], facts["tail_samples"], facts["seed"]) == ("0", "12", "5")
    engine = FakeEngine(FakeSettings(vocab=VOCABULARY))
    for item in LogitDataset(store):
        ids, start = item["input_ids"], item["start"]
        (block,) = engine.score([ScoreQuery(ids, start, top_k=0, tail_samples=12, seed=5)])
        assert isinstance(block, RowBlock)
        if not compress:
            row_bytes = (len(encode_rows(block)) - HEADER_BYTES) / len(block)
            assert 39 <= row_bytes < 40  # a byte has the high bits of four ids
        assert item["head_ids"].shape == (len(block), 0)
        np.testing.assert_array_equal(item["tail_sample_ids"], block.tail_sample_ids)
        np.testing.assert_array_equal(item["tail_sample_logprob"], block.tail_sample_logprob)
    sample_rows = sample_of(store, 0, rows=2, head=4, tokenizer=None)["rows"]
    first = LogitDataset(store)[0]["tail_sample_ids"][0].tolist()
    assert [entry["id"] for entry in sample_rows[0]["drawn"]] == first
    with pytest.raises(WrongState, match="seed = 5, not 6"):
        capture_here(tmp_path / "2", config.model_copy(update={"seed": 6}))


def test_it_goes_on_in_a_given_store(
    data: Path, words: Path, captured_store: Path, tmp_path: Path
) -> None:
    """Also one that is complete: nothing is scored again."""
    config = job(data, words, method__store=str(tmp_path / "rows"))
    capture_here(tmp_path / "1", config)
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "rows").glob("*.arrow")}
    capture_here(tmp_path / "2", config)
    assert {file: file.stat().st_mtime_ns for file in times} == times
    assert digests(tmp_path / "rows") == digests(captured_store)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"teacher__top_k": 5}, "top_k = 4, not 5"),
        ({"method__temperature": 0.5}, "temperature = 1.0, not 0.5"),
        ({"teacher__model": "vocab=64,seed=1"}, "teacher_fingerprint = "),
        ({"teacher__logprob_format": "f32"}, "logprob_format = f16, not f32"),
        ({"method__max_tokens": 20}, "max_tokens = 64, not 20"),
        ({"method__compress": True}, "compress = false, not true"),
        ({"method__shard": "0/2"}, ""),
        ({"data__path": "other"}, "data_fingerprint = "),
    ],
)
def test_a_store_of_something_else_is_refused(
    data: Path, words: Path, copied: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    before = digests(copied)
    if "data__path" in change:
        other_data = write_pairs(tmp_path / "other.jsonl", pairs(100, seed=1))
        change = {"data__path": str(other_data)}
    config = job(data, words, **{"method__store": str(copied), **change})
    if not says:
        capture_here(tmp_path / "run", config)  # a part has a directory of its own
    else:
        with pytest.raises(WrongState) as caught:
            capture_here(tmp_path / "run", config)
        assert caught.value.message.startswith(f"{copied} holds rows with {says}")
    assert {name: digest for name, digest in digests(copied).items() if name in before} == before


@pytest.mark.parametrize(
    ("change", "kind", "field", "says"),
    [
        ({"teacher__top_k": 65}, InvalidInput, "teacher.top_k", "more than this teacher returns"),
        (
            {"method__max_tokens": 9000},
            InvalidInput,
            "method.max_tokens",
            "but the teacher reads at most 8192",
        ),
        ({"teacher__engine": "hf"}, InvalidInput, "teacher.model", "no such file: vocab=64"),
        ({"data__tokenizer": "empty"}, InvalidInput, "data.tokenizer", "cannot load the tok"),
        ({"teacher__top_k": 0}, InvalidInput, "teacher.top_k", "only with tail samples"),
        (
            {"data__tokenizer": None, "teacher__model": None},
            InvalidInput,
            "data.tokenizer",
            "needs a ",
        ),
        ({"data__path": "none.jsonl"}, InvalidInput, "data.path", "no such file"),
        ({"method__max_tokens": 2}, InvalidInput, "data.path", "no sequence of at most 2"),
    ],
)
def test_what_cannot_be_captured(
    data: Path,
    words: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    kind: type[DistillError],
    field: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    # The packages of [ray] need not be installed here.
    monkeypatch.setattr("clients.preflight.packages.require_extra", lambda *_, **__: None)
    Path("empty").mkdir()
    with pytest.raises(kind) as caught:
        capture_here(tmp_path / "run", job(data, words, **change))
    assert says in caught.value.message
    assert (caught.value.field, bool(caught.value.hint)) == (field, True)
    assert not (tmp_path / "run" / "store").exists()


def test_another_tokenizer_is_refused(data: Path, tmp_path: Path) -> None:
    words = save_words(tmp_path / "words", 63)
    with pytest.raises(WrongState, match="the tokenizer has 63 tokens, the teacher 64") as caught:
        capture_here(tmp_path / "run", job(data, words))
    assert caught.value.field == "data.tokenizer"


def test_a_teacher_that_fails_on_a_sequence(words: Path, tmp_path: Path) -> None:
    """It is named, and what is complete before it stays."""
    data = write_pairs(tmp_path / "a.jsonl", [([1], [2])] * 60 + [([1], [63])] + [([1], [2])] * 9)
    config = job(data, words, teacher__model="vocab=64,nan_token=63", method__shard_bytes=500)
    with pytest.raises(Corrupt, match=r"^sequence 60 of the data: .*position 2 are not finite"):
        capture_here(tmp_path / "run", config)
    assert 0 < len(LogitDataset(tmp_path / "run" / "store")) <= 60


@pytest.mark.parametrize("count", [2, 3])
def test_parts_make_the_whole(
    data: Path, words: Path, captured_store: Path, tmp_path: Path, count: int
) -> None:
    for index in range(count):
        config = job(
            data,
            words,
            method__shard=f"{index:0{count}}/{count}",
            method__store=str(tmp_path / "parts"),
        )
        capture_here(tmp_path / f"run-{index}", config)
    parts = sorted((tmp_path / "parts").iterdir(), reverse=True)
    assert [part.name for part in parts] == [
        f"shard-{index}-of-{count}" for index in reversed(range(count))
    ]
    assert sum(len(LogitDataset(part)) for part in parts) == 100
    assert merge(tmp_path / "merged", parts) == 100
    assert digests(tmp_path / "merged") == digests(captured_store)
    assert list(tmp_path.glob(".merged*")) == []


@pytest.mark.parametrize("count", [20, 3])
def test_few_sequences_are_divided(words: Path, tmp_path: Path, count: int) -> None:
    """All of them fit into one file of 64 MiB, and yet each of two machines has its part."""
    data = write_pairs(tmp_path / "few.jsonl", [([1], [2, 3])] * count)
    changes: dict[str, Any] = {"method__shard_bytes": 64 << 20}
    _, captured_store = capture_here(tmp_path / "whole", job(data, words, **changes))
    changes["method__store"] = str(tmp_path / "parts")
    for index in range(2):
        config = job(data, words, **changes, method__shard=f"{index}/2")
        capture_here(tmp_path / f"run-{index}", config)
    parts = sorted((tmp_path / "parts").iterdir())
    assert [len(LogitDataset(part)) for part in parts] == [count // 2, count - count // 2]
    assert merge(tmp_path / "merged", parts) == count
    assert digests(tmp_path / "merged") == digests(captured_store)


def test_a_part_without_work_says_so(
    words: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_pairs(tmp_path / "few.jsonl", [([1], [2, 3])] * 2)
    verdict, _ = capture_here(tmp_path / "run", job(data, words, method__shard="0/3"))
    assert verdict == "succeeded"
    message = "shard 0/3 has nothing to do: 2 sequences in 2 files are divided among 3 shards"
    assert message in caplog.messages
    status = RunDirectory(tmp_path / "run").read_status()
    assert status is not None
    assert (status.phase, status.step) == (message, 0)


def test_records_that_are_left_out_are_told(words: Path, tmp_path: Path) -> None:
    long = ([1], [2] * 50)
    data = write_pairs(tmp_path / "some.jsonl", [([1], [2, 3]), long, ([1], []), long])
    config = job(data, words, method__max_tokens=20)
    with pytest.raises(InvalidInput, match=r"3 of 4 records \(75%\) are left out: 2 too long"):
        capture_here(tmp_path / "other", config)
    config = job(data, words, method__max_tokens=20, data__max_left_out=0.75)
    capture_here(tmp_path / "run", config)
    status = RunDirectory(tmp_path / "run").read_status()
    assert status is not None
    assert status.phase == "capturing (left out: 2 too long, 1 with nothing to score)"


def test_what_cannot_be_merged(
    data: Path, words: Path, captured_store: Path, tmp_path: Path
) -> None:
    def part(name: str, **changes: Any) -> Path:
        _, store = capture_here(tmp_path / f"run-{name}", job(data, words, **changes))
        return store

    halves = [part(f"half-{i}", method__shard=f"{i}/2") for i in range(2)]
    out = tmp_path / "out"
    with pytest.raises(InvalidInput, match="2 parts, but these are not given: 1/2"):
        merge(out, halves[:1])
    with pytest.raises(InvalidInput, match="are both part 0/2"):
        merge(out, [halves[0], halves[0]])
    other_part = part("other", method__shard="1/2", teacher__top_k=5)
    with pytest.raises(WrongState, match=r"top_k = 5, not 4; .* merge parts of one capture"):
        merge(out, [halves[0], other_part])
    with pytest.raises(WrongState, match="already exists"):
        merge(captured_store, halves)
    flip(next(halves[1].glob("*.arrow")), 700)
    with pytest.raises(Corrupt, match=r"shard 0000000\d\.arrow"):
        merge(out, halves)
    assert not out.exists()


def test_damage_is_found_and_named(copied: Path) -> None:
    assert list(damages(copied)) == []
    shard = LogitDataset(copied).shards[2]
    first = 2 * len(shard.keys)
    rows = bytes(shard.rows)
    data = (copied / shard.name).read_bytes()
    # In the middle of the rows: of some sequence of this shard.
    flip(copied / shard.name, data.index(rows) + len(rows) // 2)
    (copied / "00000004.arrow").unlink()
    problems = list(damages(copied))
    assert [problem.split(":")[0] for problem in problems] == [
        f"shard {shard.name}",
        "shard 00000004.arrow",
    ]
    assert "does not match its checksum" in problems[0]
    assert first > 0
    with pytest.raises(Corrupt, match=r"shard 00000004\.arrow of"):
        LogitDataset(copied)


def test_a_damaged_item_is_never_handed_out(copied: Path) -> None:
    shard = LogitDataset(copied).shards[1]
    rows = bytes(shard.rows)
    data = (copied / shard.name).read_bytes()
    flip(copied / shard.name, data.index(rows) + len(rows) - 1)
    stored = LogitDataset(copied)
    last = len(stored.shards[0].keys) + len(shard.keys) - 1
    assert len([stored[index] for index in range(len(stored)) if index != last]) == 99
    with pytest.raises(Corrupt, match=rf"^sequence {last} of .*00000001\.arrow"):
        stored[last]


def test_the_summary_counts(captured_store: Path) -> None:
    summary = summary_of(captured_store)
    rows = sum(len(b) + 1 for _, b in pairs(100))
    assert summary["rows"] == rows
    assert summary["tokens"] == rows + sum(len(a) for a, _ in pairs(100))
    assert summary["bytes"] == sum(file.stat().st_size for file in captured_store.glob("*.arrow"))
    assert math.isclose(float(summary["bytes_per_row"]), int(summary["bytes"]) / rows, abs_tol=0.01)
    assert summary["complete"] is True
    assert summary["shards"] == len(list(captured_store.glob("*.arrow")))
    with pytest.raises(NotFound, match="is not a store: manifest"):
        summary_of(captured_store / "manifest.json")
    with pytest.raises(NotFound, match="is not a store: manifest"):
        summary_of(captured_store.parent)


def test_compressed_rows_are_the_same(
    data: Path, words: Path, captured_store: Path, tmp_path: Path
) -> None:
    stores = []
    for compress in (True, False):
        changes = {"teacher__top_k": 32, "method__shard_bytes": 9000, "method__compress": compress}
        stores.append(capture_here(tmp_path / str(compress), job(data, words, **changes))[1])
    small, large = (int(summary_of(store)["bytes"]) for store in stores)
    assert small < large
    for first_rows, second_rows in zip(
        LogitDataset(stores[0]), LogitDataset(stores[1]), strict=True
    ):
        assert first_rows.keys() == second_rows.keys()
        assert all(np.array_equal(first_rows[name], second_rows[name]) for name in first_rows)
