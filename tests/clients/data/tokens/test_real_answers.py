"""Prompts and answers of real tokenizers: decode(prompt ids + answer ids) is the text.

Twelve tokenizers, five forms of prompts, two chat templates and the model's own, seven answers. The
small form, with tokenizers made here, is in `test_control_tokens.py` and `test_continuation.py`.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import Any

import pytest
import transformers

from clients.data.control_tokens import marked_ids
from clients.data.prompt_format import PromptFormat, default_template
from clients.data.tokens.answers import answer_end, answered_ids, completion_ids
from clients.data.tokens.loading import load_tokenizer
from tests.real_tokenizers import fetch_tokenizer

pytestmark = pytest.mark.slow

NAMES = (
    *("qwen2_5", "qwen3", "llama3", "llama3_1", "llama3_2", "gemma", "gemma2", "gemma3"),
    *("mistral_nemo", "deepseek_v3", "gpt2", "gptoss"),
)
QUESTION = "17 + 25 = ?  It's\tna\u00efve \u4f60\u597d"
ANSWERS = (
    "42",
    " 42, of course.",
    "\n\n- first\n-  second\n",
    "def f(x):\n    return x ** 2  # 1234567",
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f600 caf\u00e9",
    "Use NAME to end a turn, and <b>this</b> for bold.",
    "it ends here NAME",
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}END\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TRIMMING = PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}").replace(": ", ":\n")
FORMS = {
    "text": PromptFormat(chat_template=False),
    "text in a template": PromptFormat(chat_template=False, template="Q: {prompt}\nA:"),
    "column": PromptFormat(),
    "column and system": PromptFormat(system="Be brief."),
    "messages": PromptFormat(messages_column="messages"),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        name: load_tokenizer(transformers, str(fetch_tokenizer(name, root / name)))
        for name in NAMES
    }


def check(tokenizer: Any, prompt_format: PromptFormat, answer: str) -> str:
    """Compare the text of the ids with what the format writes; return "" or what differs."""
    record = {"prompt": QUESTION, "messages": [{"role": "user", "content": QUESTION}]}
    is_messages = prompt_format.messages_column is not None
    record["messages"] = [*record["messages"], {"role": "assistant", "content": answer}]
    conversation = prompt_format.conversation(record, "row 1")
    if is_messages:
        prompt_ids, answer_ids = answered_ids(prompt_format, tokenizer, conversation, "row 1")
        text = prompt_format.rendered(tokenizer, conversation, "", add_answer_start=False)
    else:
        prompt_ids = prompt_format.ids(tokenizer, conversation, "row 1")
        answer_ids = completion_ids(prompt_format, tokenizer, answer)
        if prompt_format.renders(tokenizer):
            prompt = prompt_format.rendered(tokenizer, conversation, "", add_answer_start=True)
        else:
            prompt = str(conversation.messages[-1]["content"])
            start = tokenizer("")["input_ids"][:1]  # the start token that the tokenizer adds
            if start and start[0] != tokenizer.eos_token_id:
                prompt = str(tokenizer.decode(start)) + prompt
        text = prompt + answer
    text = unicodedata.normalize("NFC", text)
    end_id = answer_end(tokenizer) if prompt_format.renders(tokenizer) else tokenizer.eos_token_id
    ends = {end_id, tokenizer.eos_token_id} - {None}
    if ends and answer_ids[-1] not in ends:
        return f"the last token is {answer_ids[-1]}, not one of {ends}"
    if prompt_format.renders(tokenizer) and ends & set(answer_ids[:-1]):
        return "the answer has an end within"
    ids = prompt_ids + (answer_ids[:-1] if ends else answer_ids)
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    # The name of an end at the end of an answer is its end, and what a template writes after it is
    # not learned. Templates may trim spaces.
    eos = str(tokenizer.eos_token)
    said = answer if prompt_format.renders(tokenizer) else answer.partition(eos)[0]
    written = unicodedata.normalize("NFC", said.removesuffix(eos).strip())
    expected = text[: text.rindex(written) + len(written)]
    return "" if decoded.rstrip() == expected else f"{decoded[-60:]!r} is not {expected[-60:]!r}"


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_text(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer = tokenizers[name]
    own_template = default_template(tokenizer.chat_template)
    end = str(tokenizer.eos_token)
    templates = {"plain": PLAIN.replace("END", end), "trimming": TRIMMING.replace("END", end)}
    if own_template:
        templates["own"] = own_template
    counts: Counter[str] = Counter()
    failures = []
    for form, prompt_format in FORMS.items():
        for template_name, template in templates.items():
            tokenizer.chat_template = template
            if not prompt_format.renders(tokenizer) and template_name != "plain":
                continue
            if template_name == "own" and prompt_format.system is not None and "gemma" in name:
                continue  # refuses system messages
            for answer in ANSWERS:
                difference = check(tokenizer, prompt_format, answer.replace("NAME", end))
                counts[template_name] += 1
                if difference:
                    failures.append(f"{form}, {template_name}, {answer!r}: {difference}")
    tokenizer.chat_template = own_template
    print(f"{name:14} {dict(counts)} failures: {len(failures)}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", NAMES)
def test_marked_texts_have_the_ids_of_the_others(tokenizers: dict[str, Any], name: str) -> None:
    """The copy with private names encodes texts without placeholders as the tokenizer does."""
    tokenizer = tokenizers[name]
    end = str(tokenizer.eos_token)
    for text in (*ANSWERS, f"a {end}b{end} c"):
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert marked_ids(tokenizer, text) == expected
