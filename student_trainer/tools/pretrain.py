"""Train a small language model from scratch: teachers and students for demos and tests.

    python -m student_trainer.tools.pretrain --data train.jsonl --columns prompt answer --out DIR
        --tokenizer characters --layers 3 --width 96 --steps 1000

The result is a Hugging Face directory (Qwen3 architecture) with its tokenizer. A text is the values
of the columns, joined, and an end-of-text token. With `--loss-on last` only the last column and the
end-of-text token count in the loss, so the other columns act as a prompt. With `--chat-template`, a
column may hold conversations; the template writes them, and is saved with the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from clients.data.conversation import conversation_in
from clients.data.formats import FORMATS
from clients.data.records import DataSet
from clients.data.tokens.tokenizer import read_template
from protos.errors import DistillError, InvalidInput

END = "<|end|>"
# An answer begins where the prompt ends. Without this entry, `transformers serve` searches the
# prompt of every Qwen3 model for Qwen's own markup, and repeats a prompt that has none.
_ANSWER = {
    "start_anchor_pattern": r"\Z",
    "fields": {"content": {"close": END, "content": "text"}},
}


@dataclass(frozen=True)
class Text:
    """The token ids of one text.

    - ids: all token ids.
    - prompt: the number of ids at the start from which the model does not learn.
    """

    ids: list[int]
    prompt: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the arguments, train a model, and write it to the directory --out.

    Prints one JSON line: the number of parameters, the number of tokens of the vocabulary, and the
    loss in nats per token.
    """
    options = _build_parser().parse_args(arguments)
    disable_progress_bar()
    torch.manual_seed(options.seed)
    try:
        template = _read_template(options.chat_template)
        columns = _read_columns(options, template)
    except DistillError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if Path(options.tokenizer).is_dir():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.tokenizer)
    else:
        tokenizer = make_tokenizer(
            options.tokenizer,
            ("".join(values).replace(END, "") for values in columns),
            options.vocab_size,
        )
    tokenizer.chat_template = template or tokenizer.chat_template
    texts = [_encode_text(tokenizer, values, options) for values in columns]
    model = make_model(len(tokenizer), tokenizer, options.layers, options.width)
    loss = train(model, texts, options)
    options.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"parameters": size, "vocabulary": len(tokenizer), "loss": round(loss, 4)}))


def make_tokenizer(kind: str, texts: Any, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a new tokenizer for `texts`.

    `kind`: "characters" makes a tokenizer with one token per character, and ignores `vocab_size`.
    Any other value trains a byte-level BPE tokenizer with `vocab_size` tokens.
    """
    if kind == "characters":
        alphabet = sorted(set("".join(texts)))
        vocab = {token: i for i, token in enumerate([END, *alphabet])}
        backend = Tokenizer(models.WordLevel(vocab, unk_token=END))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        backend.decoder = decoders.Fuse()
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, response_template=_ANSWER
    )


def make_model(
    vocab_size: int, tokenizer: PreTrainedTokenizerFast, layers: int, width: int
) -> Qwen3ForCausalLM:
    """Return a new Qwen3 model with random weights and tied embeddings.

    `layers`: the number of layers. `width`: the hidden size. An attention head has 16, 32 or 64
    dimensions, depending on `width`.
    """
    head = 64 if width >= 256 else 16 if width < 64 else 32
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // head,
        num_key_value_heads=width // head,
        head_dim=head,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def train(model: Qwen3ForCausalLM, texts: list[Text], options: argparse.Namespace) -> float:
    """Train `model` in place with AdamW, a warm-up and a cosine schedule. Print the loss to stderr.

    The training ends early if the mean loss of the last 50 steps is below `options.until_loss`.
    Returns this mean, in nats per token.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(options.seed)
    recent_losses: list[float] = []
    for step in range(options.steps):
        warmup = min(1.0, (step + 1) / 50)
        schedule = warmup * (0.05 + 0.95 * (1 + math.cos(math.pi * step / options.steps)) / 2)
        optimizer.param_groups[0]["lr"] = options.learning_rate * schedule
        indices = torch.randint(len(texts), (options.batch,), generator=generator).tolist()
        ids, labels = _pad_texts([texts[i] for i in indices], options.max_tokens)
        loss = model(input_ids=ids, labels=labels).loss  # a causal model ignores padding at the end
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent_losses = [*recent_losses[-49:], loss.item()]
        mean = sum(recent_losses) / len(recent_losses)
        is_below_target = mean < options.until_loss
        if is_below_target or (step + 1) % options.report_every == 0:
            print(f"step {step + 1}/{options.steps} loss {mean:.4f}", file=sys.stderr, flush=True)
        if is_below_target:
            break
    return sum(recent_losses) / len(recent_losses)


def _read_template(file: Path | None) -> str | None:
    """Return the chat template in `file`; None without a file.

    Raises InvalidInput if unreadable.
    """
    try:
        return None if file is None else read_template(file)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"cannot read {file}: {error}", field="--chat-template", hint="give a .jinja file"
        ) from error


def _read_columns(options: argparse.Namespace, template: str | None) -> list[list[str]]:
    """Return the values of the columns of each record.

    Each value except the last of a record ends with the separator. Raises InvalidInput if the data
    cannot be read, or if a value is missing. A value must be a text or, with a chat template, a
    conversation.
    """
    writer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token=END)
    writer.chat_template = template
    ends = [options.separator] * (len(options.columns) - 1) + [""]
    data = DataSet(options.data, field="--data")
    texts = []
    for place, record in data.rows(options.columns):
        values = dict(record)
        for name in options.columns:
            if template is not None and isinstance(record.get(name), list):
                conversation = conversation_in(record, name, place)
                values[name] = _write_conversation(writer, conversation.messages, place)
            elif not isinstance(record.get(name), str):
                problem = (
                    "is not a text" if name in record else f"is not one of {', '.join(record)}"
                )
                raise InvalidInput(
                    f"column {name!r} of {place} {problem}",
                    field="--columns",
                    hint="name columns of texts, or give a --chat-template for conversations",
                )
        texts.append([values[name] + end for name, end in zip(options.columns, ends, strict=True)])
    if not texts:
        raise InvalidInput(
            f"{options.data} has no records", field="--data", hint="give a file with records"
        )
    return texts


def _write_conversation(
    writer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], location: str
) -> str:
    """Return the text that the chat template of `writer` gives for a conversation.

    `location`: the place of the record, for the error message. Raises InvalidInput if the template
    raises an error.
    """
    try:
        text = writer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError, TypeError) as error:
        raise InvalidInput(
            f"the chat template cannot write {location}: {error}",
            field="--chat-template",
            hint="correct the template or the record",
        ) from error
    return str(text)


def _encode_text(
    tokenizer: PreTrainedTokenizerFast, values: list[str], options: argparse.Namespace
) -> Text:
    parts = [tokenizer(value, add_special_tokens=False)["input_ids"] for value in values]
    if parts[-1][-1:] != [tokenizer.eos_token_id]:  # a chat template may have written it
        parts[-1] = [*parts[-1], tokenizer.eos_token_id]
    ids = [i for part in parts for i in part]
    learned_tokens = len(parts[-1])
    return Text(ids, len(ids) - learned_tokens if options.loss_on == "last" else 0)


def _pad_texts(texts: list[Text], max_tokens: int) -> tuple[Tensor, Tensor]:
    length = min(max_tokens, max(len(text.ids) for text in texts))
    ids = torch.zeros(len(texts), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, text in enumerate(texts):
        token_ids = torch.tensor(text.ids[:length])
        ids[row, : len(token_ids)] = token_ids
        labels[row, text.prompt : len(token_ids)] = token_ids[text.prompt :]
    return ids, labels


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help=f"records: {FORMATS}, or a pattern")
    parser.add_argument(
        "--columns", nargs="+", default=["prompt", "answer"], help="columns to join into a text"
    )
    parser.add_argument("--separator", default="", help="text between two columns")
    parser.add_argument(
        "--chat-template", type=Path, help="a .jinja file that writes columns of conversations"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for the model")
    parser.add_argument("--tokenizer", default="bpe", help="characters, bpe, or a directory")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens of a new BPE")
    parser.add_argument(
        "--loss-on", choices=["all", "last"], default="all", help="columns that count in the loss"
    )
    parser.add_argument("--layers", type=int, default=2, help="number of layers")
    parser.add_argument("--width", type=int, default=64, help="hidden size")
    parser.add_argument("--max-tokens", type=int, default=256, help="longer texts are cut to this")
    parser.add_argument("--steps", type=int, default=500, help="most optimizer steps")
    parser.add_argument("--batch", type=int, default=128, help="texts per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--until-loss", type=float, default=0.0, help="stop below this mean loss")
    parser.add_argument("--report-every", type=int, default=100, help="steps between two reports")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order")
    return parser


if __name__ == "__main__":
    main()
