"""The commands and programs that the documents show, and who runs each of them.

Before every block of them stands a comment: `<!-- test: NAME -->`, and a test that asks for
`blocks(DOCUMENT, NAME)` runs it; or `<!-- needs: WHAT -->`, where it needs what no test has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))))
DOCUMENTS += ("deploy/README.md",)
TYPED = ("bash", "console", "sh", "python")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<verb>test|needs): (?P<mark>[^\n]*?) -->\n+)?"
    r"```(?P<kind>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the 1-based line of its first fence."""

    document: str
    line: int
    kind: str
    body: str
    test: str
    needs: str

    @property
    def commands(self) -> list[str]:
        """The commands: a backslash continues a line; a command in a console starts with "$ "."""
        lines = self.body.replace("\\\n", " ").splitlines()
        if self.kind == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        return lines if self.kind in ("bash", "sh") else []


def blocks_in(text: str, document: str) -> Iterator[Block]:
    """Yield every fenced block that names its language."""
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("body"))
        marks = {"test": "", "needs": "", match["verb"] or "": match["mark"] or ""}
        kind, body = match["kind"], match["body"]
        yield Block(document, line, kind, body, marks["test"], marks["needs"])


def blocks(document: str, test: str) -> list[Block]:
    """Return the blocks that are marked for `test`, in order; there must be at least one."""
    all_blocks = blocks_in((ROOT / document).read_text(), document)
    marked = [block for block in all_blocks if block.test == test]
    assert marked, f"{document} has no block for {test}"
    return marked
