"""HTML for whole pages and for the output of a notebook.

Both have the same style and no scripts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files

# Three times the class: more specific than the rules that notebooks have for their output.
_CLASS = "distill-view"
_SELECTOR = f".{_CLASS}" * 3


def html_page(title: str, body: Iterable[str]) -> str:
    """Return a whole HTML page with the style of reports. `body`: pieces of HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_read_style()}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def notebook_html(body: Iterable[str]) -> str:
    """Return HTML for the output of a notebook. `body`: pieces of HTML.

    The HTML contains the style of reports. The style applies only to this output of the notebook.
    It is light or dark, as the user has set in the browser.
    """
    return f'<div class="{_CLASS}"><style>{_notebook_style()}</style>{"".join(body)}</div>'


def table_html(values: Iterable[tuple[str, str]]) -> str:
    """Return an HTML table with one row for each (name, text) pair. All text is escaped."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in values
    )
    return f"<table>{rows}</table>"


def _read_style(*names: str) -> str:
    folder = files("clients.html")
    return "".join(
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", "preview.css", *names)
    )


@cache
def _notebook_style() -> str:
    style = _read_style("notebook.css").replace(":root", "&").replace("\nbody", "\n&")
    return f"{_SELECTOR} {{{style}}}"
