"""Random chat templates: of the common styles, without a place for some part, or broken."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

_HEADERS = ("", "{{ bos_token }}", "{{- bos_token -}}\n")
_TOOLS = (
    "",
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>"
    "{% endif %}",
    "{%- if tools is not none and tools %}\nTools: {{ tools | tojson(indent=1) }}\n{%- endif %}\n",
)
_CALLS = (
    "",
    "{% for call in message.tool_calls or [] %}<|call|>{{ (call.function or call) | tojson }}"
    "{% endfor %}",
    "{% if message['tool_calls'] is defined %}{% for call in message['tool_calls'] %}"
    "{{ call.function.name if call.function else call.name }}({{ call | tojson }})"
    "{% endfor %}{% endif %}",
)
_REASONING = (
    "",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}",
    "{% if message.thinking and loop.last %}({{ message.thinking | trim }}){% endif %}",
)
_CONTENTS = (
    "{{ message['content'] }}",
    "{{ message.content | trim }}",
    "{{ message.content or '' }}",
    "{{ (message.content or '').split('</think>')[-1] }}",
    "{{ (message.content or '') ~ '' }}",
)
# (before the content, after it), by role; a role that is missing has no place.
_STYLES: tuple[dict[str, tuple[str, str]], ...] = (
    {"*": ("<|start|>{{ message['role'] }}\n", "<|stop|>\n")},
    {"*": ("<|start|>{{ message.role }}<|call|>", "<|end|>")},
    {
        "user": ("[INST] ", " [/INST]"),
        "assistant": (" ", " {{ eos_token }}"),
        "system": ("<<SYS>>", "<</SYS>>"),
    },
    {"user": ("U: ", "\n"), "assistant": ("A: ", "{{ eos_token }}\n")},
    {"*": ("{{ message.role | upper }}: ", "\n")},
    {"*": ("### {{ message.role }}\n", "\n\n")},
)
BROKEN = (
    "{{ 1 / 0 }}",
    "{% for n in range(10 ** 9) %}x{% endfor %}",
    "{{ messages[999].content }}",
    "{{ messages[0].content.missing.attribute }}",
    "{{ raise_exception('no') }}",
    "{% if %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages | length + 'a' }}",
    "{{ 'a' * 2 ** 70 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages[0]['content'].encode('utf-16').decode('utf-8') }}",
    "{{ int(messages[0].content) }}",
    "{{ [] | first | tojson }}",
    "{{ dict(a=1)['b'].c }}",
    "{{ messages | tojson | fromjson }}",
    "{% include 'other' %}",
    "{{ '%d' | format('x') }}",
    "{{ [1, 'a'] | sort }}",
    "{{ messages[0].content.format(**messages[0]) }}",
)


def make_template(random: Random, *, marks_answers: bool) -> Any:
    """Return a chat template, or two by name. `marks_answers`: with {% generation %}."""
    if random.random() < 0.03:
        return random.choice(BROKEN)
    template = _compose(random, marks_answers)
    if random.random() < 0.05:
        return {"default": template, "tool_use": _compose(random, marks_answers)}
    return template


def _compose(random: Random, marks_answers: bool) -> str:
    style = random.choice(_STYLES)
    content = random.choice(_CONTENTS)
    calls = _choose(random, _CALLS)
    reasoning = _choose(random, _REASONING)
    opens, closes = ("{% generation %}", "{% endgeneration %}") if marks_answers else ("", "")
    end_is_marked = random.random() < 0.7
    branches = []
    for role, (before, after) in style.items():
        test = "true" if role == "*" else f"message['role'] == '{role}'"
        if role == "*":
            assistant_before, assistant_after = before, after
            branches.append(("message['role'] != 'assistant'", f"{before}{content}{after}"))
            test = "true"
        elif role != "assistant":
            branches.append((test, f"{before}{content}{after}"))
            continue
        else:
            assistant_before, assistant_after = before, after
        answer = f"{reasoning}{content}{calls}"
        body = (
            f"{assistant_before}{opens}{answer}{assistant_after}{closes}"
            if end_is_marked
            else f"{assistant_before}{opens}{answer}{closes}{assistant_after}"
        )
        branches.append(("message['role'] == 'assistant'", body))
    loop = "{% for message in messages %}"
    for number, (test, body) in enumerate(branches):
        loop += f"{{% {'if' if number == 0 else 'elif'} {test} %}}{body}"
    loop += "{% endif %}{% endfor %}"
    return random.choice(_HEADERS) + _choose(random, _TOOLS) + loop + _answer_start(random, style)


def _choose(random: Random, parts: Sequence[str]) -> str:
    """Return one of the parts; seldom the first one, which is empty."""
    return parts[0] if random.random() < 0.1 else random.choice(parts[1:])


def _answer_start(random: Random, style: dict[str, tuple[str, str]]) -> str:
    before = style.get("assistant", style.get("*", ("", "")))[0]
    before = before.replace("{{ message['role'] }}", "assistant")
    before = before.replace("{{ message.role }}", "assistant")
    before = before.replace("{{ message.role | upper }}", "ASSISTANT")
    extra = random.choice(["", "", "", "", "<think>", "\n"])
    if random.random() < 0.05:
        return ""
    return "{% if add_generation_prompt %}" + before + extra + "{% endif %}"
