"""Loads the tokenizer of a model as defined by its files."""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

from clients.data.hub import find_on_hub, is_hub_id
from clients.data.tokens.tokenizer import LEGACY_TEMPLATE, chat_templates_in

log = logging.getLogger(__name__)

_TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
NO_SENTENCEPIECE = (
    f"has {SENTENCEPIECE_FILE} without {_TOKENIZER_FILE}, and the package sentencepiece, which"
    " converts it, is not installed, or does not fit the installed protobuf"
)
# Version 0.2.3 needs protobuf 7.
INSTALL_SENTENCEPIECE = 'pip install "sentencepiece<=0.2.1"'
# Where pre-tokenizers and normalizers differ: digits, contractions, spaces, scripts, accents.
PROBE = (
    "It's 1234567 + 3.14, DON'T  they'll\t\tsay?!  def f(x):\n    return x**2\n\n\n"
    "na\u00efve e\u0301t\u00e9 \u4f60\u597d\u4e16\u754c \u3053\u3093 \u0928\u092e\u0938\u094d"
    " \u0645\u0631\u062d\u0628\u0627 \U0001f600 a_b-c/d <b>\u00bd</b> \u2026 end "
)


def load_tokenizer(transformers: Any, model: str, revision: str | None = None) -> Any:
    """Return the tokenizer of a directory or hub id, as transformers loads it.

    Some transformers classes replace the pre-tokenizer of tokenizer.json. In this case,
    tokenizer.json is used. The chat template may be in chat_template.json, which transformers reads
    only for processors. `transformers`: the library, which `clients` must not import.

    Raises ValueError if the directory has only a SentencePiece file and no converter is installed,
    and the errors of `from_pretrained`.
    """

    if is_hub_id(model):
        find_on_hub(model)

    def find_file(name: str) -> Path | None:
        path = transformers.utils.hub.cached_file(
            model,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if path is None else Path(path)

    file = find_file(_TOKENIZER_FILE)
    if file is None and find_file(SENTENCEPIECE_FILE) and not reads_sentencepiece():
        raise ValueError(f"{model} {NO_SENTENCEPIECE}: {INSTALL_SENTENCEPIECE}")
    options = {"revision": revision, "trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, **options)
    if file is not None:
        base_class = transformers.PreTrainedTokenizerFast
        if not _encodes_as_file(tokenizer, file, base_class, model):
            tokenizer = base_class.from_pretrained(model, **options)
    if not tokenizer.chat_template and (template_file := find_file(LEGACY_TEMPLATE)):
        tokenizer.chat_template = chat_templates_in(template_file.parent).get("default")
    _encode_probe(tokenizer)
    return tokenizer


def reads_sentencepiece() -> bool:
    """Return whether the part of the package sentencepiece that transformers uses can be imported.

    Without it, transformers would read a SentencePiece file as a file of tiktoken.
    """
    try:
        import_module("sentencepiece.sentencepiece_model_pb2")
    except Exception:  # noqa: BLE001 (protobuf has an error class of its own for its version)
        return False
    return True


def _encode_probe(tokenizer: Any) -> None:
    """Encode a character that is in no vocabulary, to detect a damaged tokenizer.

    Raises ValueError, or the error of the tokenizer, if it cannot encode the text.
    """
    try:
        tokenizer("a character that no vocabulary has: \U0010fffd")
    except BaseException as error:
        # A panic in the package's Rust code is no Exception, so no other handler catches it.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer cannot encode a text: {error}") from error


def _encodes_as_file(tokenizer: Any, file: Path, base_class: type, model: str) -> bool:
    """Return whether the tokenizer encodes PROBE as tokenizer.json does. Logs a warning if not.

    `base_class`: the transformers class that loads the file without changes.
    """
    from tokenizers import Tokenizer

    if type(tokenizer) is base_class or not hasattr(tokenizer, "backend_tokenizer"):
        return True
    in_file = Tokenizer.from_file(str(file))
    in_file.no_truncation()
    in_file.no_padding()
    expected_ids = in_file.encode(PROBE, add_special_tokens=False).ids
    if tokenizer(PROBE, add_special_tokens=False)["input_ids"] == expected_ids:
        return True
    log.warning(
        "%s of transformers splits texts otherwise than %s of %s; the file is used",
        *(type(tokenizer).__name__, _TOKENIZER_FILE, model),
    )
    return False
