"""Small tokenizers of the common kinds, as files, and the same ones without a first space."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

BOS, EOS, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SPECIAL = (BOS, EOS, PAD, "<|start|>", "<|stop|>", "<|call|>")
KINDS = ("bytes", "bytes and space", "metaspace", "llama", "unigram", "bytes and bos", "bytes ends")
_MERGED = ("t h", "th e", "i n", "e r", "a n", "o u", "s t", "1 2", "a s", "as s", "r o", "ro l")
_LETTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?+-=*/()[]{}<>|_\"'\n"
)
_SPACE = "\u2581"


@cache
def make_backend(kind: str, *, puts_space: bool = True) -> Tokenizer:
    """Return a tokenizer of one of KINDS. `puts_space`: false: never a space before a text."""
    if kind == "unigram":
        backend = Tokenizer(Unigram([("<unk>", 0.0), *_scores()], unk_id=0, byte_fallback=True))
    elif kind.startswith("bytes"):
        backend = Tokenizer(_byte_level_model())
    else:
        backend = Tokenizer(_sentencepiece_model())
    if kind.startswith("bytes"):
        space = puts_space and kind == "bytes and space"
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
        backend.decoder = decoders.ByteLevel()
    elif kind == "llama":
        parts = [normalizers.Prepend(_SPACE)] if puts_space else []
        backend.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", _SPACE)])
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(_SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        scheme = ("first" if kind == "metaspace" else "always") if puts_space else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
        )
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    added = {"bytes and bos": f"{BOS} $A", "llama": f"{BOS} $A", "bytes ends": f"{BOS} $A {EOS}"}
    if kind in added:
        names = [name for name in (BOS, EOS) if name in added[kind]]
        backend.post_processor = processors.TemplateProcessing(
            single=added[kind],
            pair=None,
            special_tokens=[(name, backend.token_to_id(name)) for name in names],
        )
    return backend


def settings_of(template: Any) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; `template`: of chats, or None."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    return settings if template is None else {**settings, "chat_template": template}


def write_tokenizer(path: Path, kind: str, template: Any = None) -> Path:
    """Write the files of a tokenizer into a directory, which is created."""
    path.mkdir(parents=True, exist_ok=True)
    make_backend(kind).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings_of(template)))
    return path


def _byte_level_model() -> BPE:
    merges = [tuple(merge.split()) for merge in (*_MERGED, "\u0120 th", "\u0120 a")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    return BPE({token: number for number, token in enumerate(tokens)}, merges)  # type: ignore[arg-type]


def _sentencepiece_model() -> BPE:
    merges = [tuple(merge.split()) for merge in (*_MERGED, f"{_SPACE} th", f"{_SPACE} a")]
    tokens = ["<unk>", *_byte_tokens(), _SPACE, *_LETTERS, *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)  # type: ignore[arg-type]


def _scores() -> list[tuple[str, float]]:
    words = [f"{_SPACE}the", f"{_SPACE}a", "the", "ing", "er", "12", "ro"]
    letters = [(letter, -8.0) for letter in (_SPACE, *_LETTERS)]
    return [*((token, -20.0) for token in _byte_tokens()), *letters, *((w, -6.0) for w in words)]


def _byte_tokens() -> list[str]:
    return [f"<0x{number:02X}>" for number in range(256)]
