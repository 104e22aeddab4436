"""The table of every key of a job file, made from the fields themselves.

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
from tests.architecture.command_reference import sections

OFFLINE = """\
Training from a store (`method.type = "offline"`) has `student`, `train`, `eval`, `checkpoint`,
`export` and `track` as above. Of `data`, `method` and `teacher` these are its own:"""
RL = """\
Learning from rewards (`method.type = "rl"`) has `student`, `data`, `teacher` (without `top_k`),
`train`, `eval`, `checkpoint`, `export` and `track` as above. These are its own:"""
SFT = """\
Supervised fine-tuning (`method.type = "sft"`) has `student`, `data` (without `teacher_column`),
`train`, `eval`, `checkpoint`, `export` and `track` as above. These are its own:"""
CAPTURE = """\
A capture (`method.type = "capture"`) has no tables but `student`, `teacher`, `data` and `method`.
Of their keys these are its own:"""

EVAL = """\
An evaluation (`method.type = "eval"`) has no tables but `student`, `data`, `reward` (as in RL),
`method` and `resources`. Of their keys these are its own:"""

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- reference: begin -->\n", "<!-- reference: end -->"


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = table_in(field)
        if inner is None or field.default is None:
            missing = field.default is PydanticUndefined
            shown = "required" if missing else f"`{json.dumps(field.default)}`"
            if field.default is None:
                shown = "none"
            yield f"| `{prefix}{name}` | {shown} | {field.description} |"
        if inner is not None:
            yield from rows(inner, f"{prefix}{name}.")


def table() -> str:
    head = ["| key | default | |", "|---|---|---|"]
    training = [*rows(OnPolicyJob)]
    lines = [*head, *training]
    others = ((RL, RLJob), (SFT, SFTJob), (CAPTURE, CaptureJob), (EVAL, EvalJob))
    for intro, kind in ((OFFLINE, OfflineJob), *others):
        lines += ["", intro, "", *head, *(row for row in rows(kind) if row not in training)]
    return "".join(line.replace("||", "\\|\\|") + "\n" for line in lines)


def with_reference(text: str, made: str) -> str:
    """The text of a page, with what was made between its two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + made + END + rest.split(END, 1)[1]


PAGES = {DOCS / "reference.md": table, DOCS / "cli.md": sections}

if __name__ == "__main__":
    for page, make in PAGES.items():
        page.write_text(with_reference(page.read_text(), make()))
