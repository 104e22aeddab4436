"""The material of the search benchmark: a directory of people, questions, and a pretrained model.

Everybody has two names and a room that is drawn at random, so every answer needs the
directory. A query returns the rooms of three people. A question names two people and asks for the
room of the first. The model is pretrained on turns that search in two of five conversations, for
either of the two people, and that answer with any of the rooms that were found, or with a random
room. So the model can copy a name and a room, but the data contains neither when to search, nor for
whom, nor which room is right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from student_trainer.environments.retriever import LocalRetriever, format_passages
from student_trainer.tools.pretrain import END
from student_trainer.tools.pretrain import main as pretrain

FIRST = [
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn",
    "Gus", "Hana", "Ivo", "Jane", "Kim", "Leo",
]  # fmt: skip
LAST = [
    "Adler", "Brook", "Cox", "Dunn", "Ekman", "Frost",
    "Green", "Hill", "Ito", "Jung", "Katz", "Lind",
]  # fmt: skip
DIGITS = "0123456789"
TAGS = [f"<{slash}{tag}>" for tag in ("search", "information", "answer") for slash in ("", "/")]
WORDS = ["Doc 1(Title: ", "Doc 2(Title: ", "Doc 3(Title: ", ")", " ", "\n", " or ", "?"]
# Each match is one token. Searches split queries into the same words.
_PIECES = Regex(r"Doc \d\(Title: |<[^>]+>| or |[A-Za-z]+|[\s\S]")
_SEARCHES = 0.4  # share of the pretraining conversations that search


@dataclass(frozen=True)
class SearchSizes:
    """Numbers of people (trained, held out), and of conversations and steps of the pretraining."""

    people: int
    held_out: int
    talks: int
    warm_steps: int
    layers: int
    width: int


@dataclass(frozen=True)
class SearchMaterial:
    """Paths of the data and the model. `moved` has the same questions with all rooms changed."""

    model: Path
    corpus: Path
    train: Path
    held_out: Path
    moved_corpus: Path
    moved: Path


def make_material(home: Path, sizes: SearchSizes) -> SearchMaterial:
    """Make directories, questions and the model; the model never sees a held-out person."""
    rng = random.Random(0)
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    rng.shuffle(names)
    learned, held_out = names[: sizes.people], names[-sizes.held_out :]
    everybody = learned + held_out
    home.mkdir(parents=True, exist_ok=True)
    material = SearchMaterial(
        *(home / name for name in ("model", "corpus.jsonl", "train.jsonl", "heldout.jsonl")),
        *(home / name for name in ("moved-corpus.jsonl", "moved.jsonl")),
    )
    rooms = {name: _draw_room(rng) for name in everybody}
    moved = {name: _draw_room(rng, rooms[name]) for name in everybody}
    training_pairs = [(name, rng.choice([n for n in learned if n != name])) for name in learned]
    examined = [(name, rng.choice([n for n in held_out if n != name])) for name in held_out]
    for path, rooms_by_name in ((material.corpus, rooms), (material.moved_corpus, moved)):
        _write(path, ({"contents": f"{name}\n{rooms_by_name[name]}"} for name in everybody))
    _write(material.train, _make_questions(training_pairs, rooms))
    _write(material.held_out, _make_questions(examined, rooms))
    _write(material.moved, _make_questions(examined, moved))
    _make_model(home, material, learned, sizes, rng)
    return material


def _draw_room(rng: random.Random, excluded_room: str = "") -> str:
    """Return one of 100 rooms, but not `excluded_room`."""
    return rng.choice([room for n in range(100) if (room := f"{n:02d}") != excluded_room])


def _make_questions(pairs: list[tuple[str, str]], rooms: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"prompt": f"{name} or {other_name}?", "answer": rooms[name]} for name, other_name in pairs
    ]


def _make_model(
    home: Path, material: SearchMaterial, learned: list[str], sizes: SearchSizes, rng: random.Random
) -> None:
    """Pretrain on conversations about people whose rooms are drawn again for each."""
    directory = LocalRetriever(str(material.corpus))
    turns = []  # (context, continuation)
    for _ in range(sizes.talks):
        name, other_name = rng.sample(learned, 2)
        question, searched_name = f"{name} or {other_name}?", rng.choice([name, other_name])
        searches_first = rng.random() < _SEARCHES
        turns.append(
            (
                question,
                f"<search>{searched_name}</search>"
                if searches_first
                else _format_answer(_draw_room(rng)),
            )
        )
        turns.append((f"{question}<search>", f"{searched_name}</search>"))
        passages_found = directory.passages([searched_name], 3)[0] or []
        rooms = [_draw_room(rng) for _ in passages_found]
        passages = [f"{p.splitlines()[0]}\n{r}" for p, r in zip(passages_found, rooms, strict=True)]
        context = f"\n\n<information>{format_passages(passages)}</information>\n\n"
        turns.append(
            (
                f"{question}<search>{searched_name}</search>{context}",
                _format_answer(rng.choice(rooms)),
            )
        )
    _write(
        home / "turns.jsonl",
        ({"prompt": context, "answer": continuation} for context, continuation in turns),
    )
    make_tokenizer().save_pretrained(home / "tokenizer")
    arguments = ["--data", str(home / "turns.jsonl"), "--out", str(material.model)]
    arguments += ["--loss-on", "last", "--tokenizer", str(home / "tokenizer")]
    arguments += ["--layers", str(sizes.layers), "--width", str(sizes.width)]
    arguments += ["--batch", "32", "--learning-rate", "5e-3"]
    pretrain([*arguments, "--steps", str(sizes.warm_steps)])


def _format_answer(room: str) -> str:
    return f"<answer>{room}</answer>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each name, room, tag and word."""
    tokens = [END, *FIRST, *LAST, *DIGITS, *TAGS, *WORDS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    inner.pre_tokenizer = pre_tokenizers.Split(_PIECES, "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=END)


def _write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
