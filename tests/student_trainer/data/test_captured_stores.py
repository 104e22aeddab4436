"""Unusable stores are refused at the start, in one sentence: field, fault, remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.teacher.query import tokenizer_fingerprint
from protos.errors import Corrupt, DistillError, InvalidInput, NotFound, WrongState
from student_trainer.data.captured_stores import open_stores
from student_trainer.run.model_checks import check_stored_length, check_stored_vocabulary
from tests.student_trainer import tiny
from tests.student_trainer.small_store import sums, write_store

SEQUENCES = 20
WORDS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "store"
    return write_store(path, tiny.model(), sums(SEQUENCES), samples=2)


@dataclass(frozen=True)
class Refusal:
    """Changes to a valid job that make it invalid; `spoil` damages a copy of the store."""

    changes: dict[str, Any]
    says: tuple[str, ...]  # the field first, then what is wrong, then the remedy
    category: type[DistillError] = WrongState
    spoil: Callable[[Path], object] = lambda store: None


def change_manifest(**facts: str) -> Callable[[Path], object]:
    def spoil(store: Path) -> None:
        document = json.loads((store / "manifest.json").read_text())
        document["metadata"] |= facts
        (store / "manifest.json").write_text(json.dumps(document))

    return spoil


def delete_facts(store: Path) -> None:
    document = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps(document | {"metadata": {}}))


def truncate_shard(store: Path) -> None:
    shard = sorted(store.glob("*.arrow"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])


REFUSALS = {
    "another k": Refusal(
        {"method__top_k": 8}, ("method.top_k: ", "sets 8", "captured with 4", "remove the key")
    ),
    "another temperature": Refusal(
        {"method__temperature": 2.0}, ("method.temperature: ", "sets 2.0", "captured with 1.0")
    ),
    "another teacher": Refusal(
        {"method__teacher_fingerprint": "ab"}, ("method.teacher_fingerprint: ", "sets ab")
    ),
    "no samples": Refusal(
        {"method__tail": "bucket+teacher_samples"},
        ("method.tail: ", "has no tail samples", "capture with method.tail_samples"),
        spoil=change_manifest(tail_samples="0"),
    ),
    "not complete": Refusal(
        {},
        ("data.path: ", f"has {SEQUENCES} of 999 sequences", "run the same capture again"),
        spoil=change_manifest(sequences="999"),
    ),
    "a cache": Refusal(
        {}, ("data.path: ", "was not written by distill capture"), InvalidInput, spoil=delete_facts
    ),
    "no store": Refusal(
        {},
        ("data.path: ", "is not a store: no such directory"),
        NotFound,
        spoil=shutil.rmtree,
    ),
    "a damaged shard": Refusal(
        {},
        (
            "data.path: ",
            "shard 00000001.arrow of ",
            "is damaged or missing",
            "distill store verify",
        ),
        Corrupt,
        spoil=truncate_shard,
    ),
    "plain text": Refusal(
        {"method__on_policy_fraction": 0.5, "teacher__address": "localhost:1"},
        ("method.on_policy_fraction: ", "has plain text and no prompts", "remove the key"),
        spoil=change_manifest(form="text"),
    ),
    "no head and no tail": Refusal(
        {"method__tail": "none"},
        ("method.tail: ", "have no head", "remove the key"),
        spoil=change_manifest(top_k="0"),
    ),
    "a held-out store of another teacher": Refusal(
        {"data__eval_path": True},
        ("data.eval_path: ", "teacher_fingerprint is of a test in the", "capture both"),
        spoil=change_manifest(teacher_fingerprint="another"),
    ),
    "too few": Refusal(
        {"eval__prompts": SEQUENCES}, ("data.path: ", "set eval.prompts to at most"), InvalidInput
    ),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_refusals(case: Refusal, material: tiny.Material, store: Path, tmp_path: Path) -> None:
    store_copy = tmp_path / "store"
    shutil.copytree(store, store_copy)
    case.spoil(store_copy)
    changes = {**case.changes}
    if changes.pop("data__eval_path", None):
        changes["data__eval_path"] = str(store)
    with pytest.raises(case.category) as caught:
        open_stores(tiny.offline_job(material, store_copy, **changes))
    message = str(caught.value)
    assert message.startswith(case.says[0])
    assert all(text in message for text in case.says)
    assert "\n" not in message


def test_what_fits_is_taken(material: tiny.Material, store: Path) -> None:
    changes = {"top_k": 4, "temperature": 1.0, "teacher_fingerprint": "of a test"}
    pinned = {f"method__{name}": value for name, value in changes.items()}
    stores = open_stores(tiny.offline_job(material, store, data__eval_path=str(store), **pinned))
    assert stores.held_out is not None
    assert stores.training.longest == max(len(ids) for ids, _ in sums(SEQUENCES))
    assert stores.training.identity == stores.held_out.identity
    check_stored_length(stores.training, stores.training.longest)
    with pytest.raises(
        InvalidInput, match=r"tokens, but the student can read only 5; capture again with"
    ):
        check_stored_length(stores.training, 5)


def test_tokens_of_a_store(material: tiny.Material, store: Path, tmp_path: Path) -> None:
    store_copy = tmp_path / "store"
    shutil.copytree(store, store_copy)
    change_manifest(tokenizer_fingerprint=tokenizer_fingerprint(WORDS), vocab_size="3")(store_copy)
    training_store = open_stores(tiny.offline_job(material, store_copy)).training
    assert check_stored_vocabulary(training_store, WORDS, 3, None) == 3
    assert check_stored_vocabulary(training_store, WORDS, 4, None) == 3
    with pytest.raises(WrongState, match=r"id 2 is the token 'c', for which the student has no"):
        check_stored_vocabulary(training_store, WORDS, 2, None)
    change_manifest(vocab_size="5")(store_copy)
    wide_store = open_stores(tiny.offline_job(material, store_copy)).training
    with pytest.raises(
        WrongState, match=r"cover 5 ids, but the student has logits for 4 only; capture again"
    ):
        check_stored_vocabulary(wide_store, WORDS, 4, None)
    other_words = ["a", "x", "c"]
    with pytest.raises(WrongState, match="id 1 is 'x' to the student and 'b' to the teacher"):
        check_stored_vocabulary(training_store, other_words, 3, WORDS)
    # The tokenizer that is at that path now is not the one of the capture.
    for stored_words in (None, ["a"]):
        with pytest.raises(WrongState, match="captured with another tokenizer than the student's"):
            check_stored_vocabulary(training_store, other_words, 3, stored_words)
