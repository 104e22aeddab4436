"""Links from a page to a file of the repository that is no page, such as `../protos/auth/tls.py`.

The site does not hold these files: with `repo_url` in mkdocs.yml such a link leads to the file in
the repository, without it the path is shown as text. A link to a file that does not exist is a
warning, which ends a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.plugins.repository_links")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    root = Path(config.config_file_path).parent
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def shown(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found["target"]))
        if path.startswith("docs/"):
            return found[0]
        if path.startswith("..") or not (root / path).exists():
            log.warning("%s: no such file in the repository: %s", page.file.src_uri, path)
        text = found["text"].strip("`")
        if config.repo_url:
            return f"[{found['text']}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        same = text in (path, posixpath.basename(path))
        return f"`{path}`" if same else f"{found['text']} (`{path}`)"

    return LINK.sub(shown, markdown)
