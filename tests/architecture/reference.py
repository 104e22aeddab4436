"""The table of every key of a job file, generated from the fields.

`python -m tests.architecture.reference` writes it into docs/reference.md, and the options of all
commands into docs/cli.md; a test keeps both pages up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from clients.config.capture import CaptureJob
from clients.config.evaluation import EvalJob
from clients.config.offline import OfflineJob
from clients.config.on_policy import OnPolicyJob
from clients.config.problems import table_in
from clients.config.rl import RLJob
from clients.config.sft import SFTJob
from tests.architecture.command_reference import format_sections

OFFLINE = """\
Offline training (`method.type = "offline"`) has the tables `student`, `train`, `eval`,
`checkpoint`, `export` and `track` as above. Its tables `data`, `method` and `teacher` are:"""
RL = """\
Reinforcement learning (`method.type = "rl"`) has the tables `student`, `data`, `teacher` (without
`top_k`), `train`, `eval`, `checkpoint`, `export` and `track` as above. Its further keys are:"""
SFT = """\
Supervised fine-tuning (`method.type = "sft"`) has the tables `student`, `data` (without
`teacher_column`), `train`, `eval`, `checkpoint`, `export` and `track` as above. Its further keys
are:"""
CAPTURE = """\
A capture (`method.type = "capture"`) has only the tables `student`, `teacher`, `data` and
`method`. Its further keys are:"""

EVAL = """\
An evaluation (`method.type = "eval"`) has only the tables `student`, `data`, `reward` (as in
RL), `method` and `resources`. Its further keys are:"""

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- reference: begin -->\n", "<!-- reference: end -->"


def format_rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        nested_model = table_in(field)
        if nested_model is None or field.default is None:
            is_required = field.default is PydanticUndefined
            default = "required" if is_required else f"`{json.dumps(field.default)}`"
            if field.default is None:
                default = "none"
            description = " ".join((field.description or "").split())
            yield f"| `{prefix}{name}` | {default} | {description} |"
        if nested_model is not None:
            yield from format_rows(nested_model, f"{prefix}{name}.")


def format_tables() -> str:
    head = ["| key | default | meaning |", "|---|---|---|"]
    training = [*format_rows(OnPolicyJob)]
    lines = [*head, *training]
    other_kinds = ((RL, RLJob), (SFT, SFTJob), (CAPTURE, CaptureJob), (EVAL, EvalJob))
    for intro, kind in ((OFFLINE, OfflineJob), *other_kinds):
        lines += ["", intro, "", *head, *(row for row in format_rows(kind) if row not in training)]
    return "".join(line.replace("||", "\\|\\|") + "\n" for line in lines)


def insert_reference(text: str, reference: str) -> str:
    """Return the text of a page with `reference` between its two marks."""
    text_before, text_after_begin = text.split(BEGIN)
    return text_before + BEGIN + reference + END + text_after_begin.split(END, 1)[1]


PAGES = {DOCS / "reference.md": format_tables, DOCS / "cli.md": format_sections}

if __name__ == "__main__":
    for page, make in PAGES.items():
        page.write_text(insert_reference(page.read_text(), make()))
