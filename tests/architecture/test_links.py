"""Links of the Markdown files: what a relative link names exists, with its heading, and a broken
one fails the build of the site.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import DOCUMENTS, ROOT

PAGES = sorted({*DOCUMENTS, *(path.name for path in ROOT.glob("*.md"))})
LINK = re.compile(r"\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
ELSEWHERE = re.compile(r"[a-z]+:")


def remove_code(text: str) -> str:
    """Return the text without code blocks and inline code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def heading_anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and the site generate them."""
    anchors: set[str] = set()
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number = next(n for n in range(100) if (f"{words}-{n}" if n else words) not in anchors)
        anchors.add(f"{words}-{number}" if number else words)
    return anchors


def broken_links(page: str, text: str) -> list[str]:
    """Return the broken relative links in `text`, the content of `page`."""
    targets = []
    for link in LINK.finditer(remove_code(text)):
        path, anchor = link["path"], link["anchor"]
        if ELSEWHERE.match(path):
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        exists = target.resolve().is_relative_to(ROOT) and target.exists()
        is_valid = exists and (
            not anchor or anchor in heading_anchors(target.read_text() if path else text)
        )
        if not is_valid:
            targets.append(link[0])
    return targets


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    assert broken_links(page, (ROOT / page).read_text()) == []


@pytest.mark.parametrize(
    "link",
    [
        *("](nowhere.md)", "](faults.md#no-such-heading)", "](#neither)"),
        *("](../protos/no.py)", "](../../outside)", "](/docs/faults.md)"),
    ],
)
def test_a_broken_link_is_found(link: str) -> None:
    assert broken_links("docs/faults.md", f"# Title\n\n[text{link}\n") == [link]


def test_links_that_are_fine() -> None:
    text = (
        "# A title, and `code`\n\n[a](#a-title-and-code) [b](faults.md#jobs) [c](https://x.y/z)\n"
    )
    assert broken_links("docs/faults.md", text) == []


BROKEN = {
    "a page": "[x](nowhere.md)",
    "a heading": "[x](#nowhere)",
    "a heading elsewhere": "[x](faults.md#nowhere)",
    "a file of the repository": "[x](../protos/nowhere.py)",
    "nothing": "[x](../protos/teacher.proto)",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_the_build_fails_on_a_broken_link(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "teacher.proto").touch()
    hooks = shutil.copytree(ROOT / "docs" / "hooks", tmp_path / "docs" / "hooks")
    assert list(hooks.glob("*.py"))
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{BROKEN[kind]}\n")
    (tmp_path / "docs" / "faults.md").write_text("# Faults\n")
    settings = (ROOT / "mkdocs.yml").read_text()
    settings, nav, _ = settings.partition("\nnav:\n")
    assert nav
    (tmp_path / "mkdocs.yml").write_text(settings + "\n")
    process = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (process.returncode == 0) == (kind == "nothing"), process.stderr
    page = (tmp_path / "site" / "index.html").read_text() if kind == "nothing" else "</code>"
    assert "</code>" in page
