"""The preview of a job as HTML without scripts: a page, and a section for reports and notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from clients.data.preview import Preview, RecordPreview, TokenView
from clients.html import html_page, notebook_html, table_html

_LEGEND = (
    ("context", "read, not learned"),
    ("learned", "learned"),
    ("end", "learned, and ends an answer"),
    ("sampled", "written by the student"),
)


@dataclass(frozen=True, repr=False)
class PreviewDisplay(Preview):
    """A preview that is shown as HTML in a notebook, and as a short text elsewhere."""

    @classmethod
    def of(cls, preview: Preview) -> PreviewDisplay:
        """Return a PreviewDisplay with the content of `preview`."""
        return cls(preview.method, preview.warnings, preview.facts, preview.records)

    def __repr__(self) -> str:
        counts = [f"{len(self.records)} records", *self.warnings]
        return f"<Preview of {self.method}: {'; '.join(counts)}>"

    def _repr_html_(self) -> str:
        return notebook_html(render_preview(self))


def preview_page(name: str, preview: Preview) -> str:
    """Return the HTML page of `distill preview`. All text of the job is escaped."""
    heading = f'<h1>{escape(name)}</h1><p class="soft">preview, {escape(preview.method)}</p>'
    return html_page(name, [heading, *render_preview(preview)])


def render_preview(preview: Preview) -> Iterator[str]:
    """Yield the parts of the HTML section about the training data."""
    for warning in preview.warnings:
        yield f'<p class="warning">{escape(warning)}</p>'
    yield f'<div class="card">{table_html(preview.facts)}</div>'
    keys = (f'<span class="token {kind}">{label}</span>' for kind, label in _LEGEND)
    yield f'<p class="tokens legend">{" ".join(keys)}</p>'
    yield from map(_render_record, preview.records)


def _render_record(record: RecordPreview) -> str:
    problem = f' <span class="failed">{escape(record.problem)}</span>' * bool(record.problem)
    lost = "".join(
        f'<p class="lost"><b>missing from the input, {escape(part)}:</b>'
        f" <del><bdi>{escape(text)}</bdi></del></p>"
        for part, text in record.lost
    )
    views = "".join(map(_render_view, record.views))
    return f'<div class="card"><b>{escape(record.where)}</b>{problem}{lost}{views}</div>'


def _render_view(view: TokenView) -> str:
    spans = (
        f'<bdi class="token {run.kind}">{_render_text(text)}</bdi>'
        for run in view.runs
        for text in run.texts
    )
    return f'<p class="soft">{escape(view.counts)}</p><p class="tokens">{"".join(spans)}</p>'


def _render_text(text: str) -> str:
    return escape(text).replace("\n", "<i>\\n</i>\n")
