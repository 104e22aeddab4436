"""Stores imported from dumped prompt_logprobs: rows compared with numpy in float64, interrupted
imports, refused dumps.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clients.store import import_dump as module
from clients.store.dataset import LogitDataset
from clients.store.import_dump import Dump, import_dump
from protos.errors import InvalidInput, WrongState
from tests.teacher_service.tiny_model import save_tokenizer

VOCAB, K = 40, 5


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


def random_logprobs(number: int, length: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return random token ids [length] and log-probs [length, VOCAB] for their positions."""
    rng = np.random.default_rng(number)
    logits = 3 * rng.standard_normal((length, VOCAB))
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return rng.integers(0, VOCAB, length).astype(np.int32), logprobs


def vllm_answer(number: int, length: int, k: int = K) -> dict[str, Any]:
    """An answer as vLLM gives it: the k likeliest ids and the token, with ranks, in any order; the
    first position is null.
    """
    tokens, logprobs = random_logprobs(number, length)
    prompt_logprobs: list[Any] = [None]
    for token, row in zip(tokens[1:], logprobs[1:], strict=True):
        ranks = np.empty(VOCAB, int)
        ranks[np.argsort(-row)] = np.arange(1, VOCAB + 1)
        names = {int(token), *map(int, np.argsort(-row)[:k])}
        prompt_logprobs.append(
            {str(i): {"logprob": float(row[i]), "rank": int(ranks[i])} for i in sorted(names)}
        )
    return {"prompt_token_ids": tokens.tolist(), "prompt_logprobs": prompt_logprobs}


def write_dump(path: Path, count: int, **changes: Any) -> Path:
    lines = [json.dumps({**vllm_answer(n, 4 + n % 9), **changes}) for n in range(count)]
    path.write_text("\n".join(lines))
    return path


def file_digests(store: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in store.iterdir()}


def test_the_rows_are_those_of_the_softmax(tokenizer_directory: Path, tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump.jsonl", 20, start=2)
    assert import_dump(tmp_path / "store", Dump(dump, tokenizer_directory, VOCAB)) == 20
    dataset = LogitDataset(tmp_path / "store")
    assert len(dataset) == 20
    for number in range(20):
        item = dataset[number]
        tokens, logprobs = random_logprobs(number, 4 + number % 9)
        rows, likeliest = logprobs[2:], np.argsort(-logprobs[2:])[:, :K]
        assert (item["start"], item["input_ids"].tolist()) == (2, tokens.tolist())
        assert np.array_equal(item["head_ids"], likeliest)
        head = np.take_along_axis(rows, likeliest, axis=1)
        assert np.abs(item["head_logprobs"] - head).max() < 5e-3  # float16
        assert np.abs(item["tail_logmass"] - np.log1p(-np.exp(head).sum(axis=1))).max() < 1e-5
        assert np.abs(item["token_logprobs"] - rows[range(len(rows)), tokens[2:]]).max() < 1e-5


def test_answers_of_completions_and_fewer_ids(tokenizer_directory: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps({"choices": [vllm_answer(n, 9)]}) + "\n" for n in range(3)))
    import_dump(tmp_path / "store", Dump(dump, tokenizer_directory, VOCAB, top_k=2))
    item = LogitDataset(tmp_path / "store")[1]
    assert np.array_equal(item["head_ids"], np.argsort(-random_logprobs(1, 9)[1][1:])[:, :2])


def test_a_token_of_the_next_rank_is_no_head_id(tokenizer_directory: Path, tmp_path: Path) -> None:
    """The token is the (k + 1)-th likeliest at one position, and in the head at another one."""
    _, logprobs = random_logprobs(0, 4)
    order = np.argsort(-logprobs)
    tokens = [0, int(order[1, K]), int(order[2, 0]), int(order[3, K])]
    prompt_logprobs: list[Any] = [None]
    for position in (1, 2, 3):
        names = dict.fromkeys([*map(int, order[position, :K]), tokens[position]])
        ranks = {int(i): rank + 1 for rank, i in enumerate(order[position])}
        row = logprobs[position]
        prompt_logprobs.append(
            {str(i): {"logprob": float(row[i]), "rank": ranks[i]} for i in names}
        )
    dump = tmp_path / "dump.jsonl"
    dump.write_text(json.dumps({"prompt_token_ids": tokens, "prompt_logprobs": prompt_logprobs}))
    import_dump(tmp_path / "store", Dump(dump, tokenizer_directory, VOCAB))
    assert np.array_equal(LogitDataset(tmp_path / "store")[0]["head_ids"], order[1:, :K])


def test_an_interrupted_import_goes_on(
    tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SEQUENCES_PER_FILE", 4)
    dump = Dump(write_dump(tmp_path / "dump.jsonl", 10), tokenizer_directory, VOCAB)
    import_dump(tmp_path / "whole", dump)
    encode_rows, calls = module.encode_rows, iter(range(100))

    def encode_or_interrupt(*arguments: Any) -> bytes:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return encode_rows(*arguments)

    monkeypatch.setattr(module, "encode_rows", encode_or_interrupt)
    with pytest.raises(KeyboardInterrupt):
        import_dump(tmp_path / "store", dump)
    assert len(list((tmp_path / "store").glob("*.arrow"))) == 1
    assert import_dump(tmp_path / "store", dump) == 10
    assert next(calls) == 13, "the first file was not made again"
    assert file_digests(tmp_path / "store") == file_digests(tmp_path / "whole")


def test_without_pyarrow_nothing_is_written(
    tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = Dump(write_dump(tmp_path / "dump.jsonl", 2), tokenizer_directory, VOCAB)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match="pyarrow"):
        import_dump(tmp_path / "store", dump)
    assert not (tmp_path / "store").exists()


def test_another_dump_is_refused(tokenizer_directory: Path, tmp_path: Path) -> None:
    import_dump(
        tmp_path / "store", Dump(write_dump(tmp_path / "a.jsonl", 2), tokenizer_directory, VOCAB)
    )
    other_dump = Dump(write_dump(tmp_path / "b.jsonl", 3), tokenizer_directory, VOCAB)
    with pytest.raises(WrongState, match="holds rows with"):
        import_dump(tmp_path / "store", other_dump)


def _drop_last_position(record: dict[str, Any]) -> None:
    record["prompt_logprobs"].pop()


def _delete_token(record: dict[str, Any]) -> None:
    del record["prompt_logprobs"][2][str(record["prompt_token_ids"][2])]


def _set_impossible_logprobs(record: dict[str, Any]) -> None:
    for entry in record["prompt_logprobs"][1].values():
        entry["logprob"] = 2.0


def _clear_record(record: dict[str, Any]) -> None:
    record.clear()


def _rename_id(record: dict[str, Any]) -> None:
    [entries] = record["prompt_logprobs"][1:2]
    other_id = next(i for i in entries if int(i) != record["prompt_token_ids"][1])
    entries["77777"] = entries.pop(other_id)


def _set_fractional_start(record: dict[str, Any]) -> None:
    record["start"] = 1.5


def _set_huge_token_id(record: dict[str, Any]) -> None:
    record["prompt_token_ids"][3] = 3_000_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_last_position, "token ids and"),
        (_delete_token, "a row that cannot be read"),
        (_set_impossible_logprobs, "in row 0 (from 0), a log-prob of the head ids is 2, but"),
        (_clear_record, "this is not an answer of vLLM: KeyError"),
        (_rename_id, "id 77777 is none of the 40 ids of the vocabulary"),
        (_set_fractional_start, "start is 1.5"),
        (_set_huge_token_id, "is none of the 40 ids of the vocabulary"),
    ],
)
def test_a_bad_line_is_named(
    change: Callable[[dict[str, Any]], None],
    message: str,
    tokenizer_directory: Path,
    tmp_path: Path,
) -> None:
    bad_answer = vllm_answer(1, 8)
    change(bad_answer)
    dump = tmp_path / "dump.jsonl"
    dump.write_text(
        "".join(json.dumps(answer) + "\n" for answer in (vllm_answer(0, 8), bad_answer))
    )
    with pytest.raises(InvalidInput, match="line 2: ") as caught:
        import_dump(tmp_path / "store", Dump(dump, tokenizer_directory, VOCAB))
    assert message in caught.value.message
    assert caught.value.field == "--dump"


def _return_none(entries: dict[str, Any]) -> None:
    return None


def _drop_ranks(entries: dict[str, Any]) -> dict[str, Any]:
    return {i: {"logprob": entry["logprob"]} for i, entry in entries.items()}


def _keep_logprobs_only(entries: dict[str, Any]) -> dict[str, Any]:
    return {i: entry["logprob"] for i, entry in entries.items()}


def _keep_token_only(entries: dict[str, Any]) -> dict[str, Any]:
    """Keep only the token, as with prompt_logprobs = 0."""
    return {i: {**entry, "rank": 9} for i, entry in list(entries.items())[:1]}


@pytest.mark.parametrize(
    "change", [_return_none, _drop_ranks, _keep_logprobs_only, _keep_token_only]
)
def test_a_bad_first_line_is_named(
    change: Callable[[dict[str, Any]], Any], tokenizer_directory: Path, tmp_path: Path
) -> None:
    """The importer reads the number of head ids from the first line."""
    record = vllm_answer(0, 8)
    record["prompt_logprobs"][1] = change(record["prompt_logprobs"][1])
    (dump := tmp_path / "dump.jsonl").write_text(json.dumps(record))
    with pytest.raises(InvalidInput, match="line 1: "):
        import_dump(tmp_path / "store", Dump(dump, tokenizer_directory, VOCAB))
    assert not (tmp_path / "store").exists()


def test_the_command(tokenizer_directory: Path, tmp_path: Path) -> None:
    dump = write_dump(tmp_path / "dump.jsonl", 3)
    command = [sys.executable, "-m", "clients", "store"]
    options = [
        "--dump",
        str(dump),
        "--tokenizer",
        str(tokenizer_directory),
        "--vocab-size",
        str(VOCAB),
    ]
    import_process = subprocess.run(
        [*command, "import", str(tmp_path / "store"), *options], capture_output=True, text=True
    )
    assert (import_process.returncode, import_process.stdout) == (
        0,
        f"{tmp_path / 'store'}: 3 sequences\n",
    )
    verify_process = subprocess.run(
        [*command, "verify", str(tmp_path / "store")], capture_output=True
    )
    assert verify_process.returncode == 0
    (tmp_path / "nothing").mkdir()
    for path, field in ((dump.with_name("no"), "--dump"), (tmp_path / "nothing", "--tokenizer")):
        wrong_options = [*options, field, str(path)]
        process = subprocess.run(
            [*command, "import", str(tmp_path / "other"), *wrong_options],
            capture_output=True,
            text=True,
        )
        assert process.returncode == 2
        assert process.stderr.startswith(f"error: {field}: cannot read ")
        assert process.stderr.count("\n") == 1
