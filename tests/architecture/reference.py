"""The table of every key of a job file, generated from the fields.

`python -m tests.architecture.reference` writes it into docs/reference.md, and the options of all
commands into docs/cli.md; a test keeps both pages up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

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
from tests.architecture.metrics_reference import format_metrics

OTHER_KINDS = {
    "Offline training": OfflineJob,
    "Reinforcement learning": RLJob,
    "Supervised fine-tuning": SFTJob,
    "A capture": CaptureJob,
    "An evaluation": EvalJob,
}

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
    for name, kind in OTHER_KINDS.items():
        rows = [row for row in format_rows(kind) if row not in training]
        method = get_args(kind.model_fields["method"].annotation.model_fields["type"].annotation)
        intro = f'{name} (`method.type = "{method[0]}"`) {_shared_keys(training, kind)}.'
        lines += ["", f"{intro} Its further or different keys are:", "", *head, *rows]
    return "".join(line.replace("||", "\\|\\|") + "\n" for line in lines)


def _shared_keys(training: list[str], kind: type[BaseModel]) -> str:
    """Say which keys of `training`, the rows of `on_policy`, a job of `kind` accepts and lacks."""
    accepted_keys = {_key_of(row) for row in format_rows(kind)}
    keys = [key for row in training if not (key := _key_of(row)).startswith("method.")]
    tables: dict[str, list[str]] = {}
    for key in keys:
        tables.setdefault(key.split(".")[0], []).append(key)
    accepted, lacked = [], []
    for table, table_keys in tables.items():
        shared_keys = [key for key in table_keys if key in accepted_keys]
        missing_keys = [key for key in table_keys if key not in accepted_keys]
        if not shared_keys:
            lacked.append(table)
        elif len(missing_keys) > len(shared_keys):
            accepted += shared_keys
        else:
            accepted.append(table)
            lacked += missing_keys
    return f"accepts {_list_keys(accepted)} of the table above, without {_list_keys(lacked)}"


def _list_keys(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _key_of(row: str) -> str:
    return row.split("`")[1]


def insert_reference(text: str, reference: str) -> str:
    """Return the text of a page with `reference` between its two marks."""
    text_before, text_after_begin = text.split(BEGIN)
    return text_before + BEGIN + reference + END + text_after_begin.split(END, 1)[1]


PAGES = {
    DOCS / "reference.md": format_tables,
    DOCS / "cli.md": format_sections,
    DOCS / "metrics.md": format_metrics,
}

if __name__ == "__main__":
    for page, make in PAGES.items():
        page.write_text(insert_reference(page.read_text(), make()))
