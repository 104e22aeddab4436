"""The Python client in a notebook, executed as in Jupyter: client.ipynb on tiny models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.processes import ENVIRONMENT, MakeServer

if TYPE_CHECKING:
    from tests.student_trainer.tiny import Material

NOTEBOOK = Path(__file__).with_name("client.ipynb")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the packages of Jupyter
def test_the_notebook(
    make_server: MakeServer, material: Material, teacher: str, tmp_path: Path
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    environment = {
        **ENVIRONMENT,
        "PYTHONWARNINGS": "default",
        "SERVER": make_server(slots=2).address,
        "TEACHER": teacher,
        "STUDENT": str(material.student),
        "PROMPTS": str(material.prompts),
    }
    executor = nbclient.NotebookClient(
        notebook, timeout=1000, resources={"metadata": {"path": str(tmp_path)}}
    )
    executor.execute(env=environment)
    if picture := os.environ.get("NOTEBOOK_OUTPUT"):
        nbformat.write(notebook, picture)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = {cell.source.splitlines()[-1]: cell.outputs for cell in cells}
    html, text = (lambda last: _content(outputs[last], "text/html")), _text
    assert _text(outputs["config"]).startswith("OnPolicyJob(name='addition', student=")
    assert "learned" in html("preview(config, records=2)")
    assert "QUEUED" in html("job")
    view = html("job.show()")
    for part in ("SUCCEEDED", "KL, nats per token", "Samples of step 20", "step 20 of 20"):
        assert part in view, part
    assert '<svg class="spark"' in html("job.refresh()")
    assert text(outputs["print(steps[-1], job.frame().shape)"]).startswith("20 (2")
    assert 'class="samples"' in html("job.samples()")
    stopped = outputs["local.show()"]
    assert "CANCELLED" in _content(stopped, "text/html")
    assert stopped[-1].ename == "KeyboardInterrupt"
    resumed = outputs["local"]
    assert text(resumed[:1]).startswith("CANCELLED True")
    assert "attempt 2" in _content(resumed, "text/html")
    assert "SUCCEEDED" in _content(resumed, "text/html")
    assert html("jobs").count("SUCCEEDED") == 4
    comparison = html("jobs.compare()")
    assert all(f"<td>{rate}</td>" in comparison for rate in (0.0001, 0.001, 0.003, 0.01))
    last = outputs["tokenizer.decode(student.generate(ids, max_new_tokens=4, do_sample=False)[0])"]
    assert "12+34=" in text(last)


def _content(outputs: list[Any], kind: str) -> str:
    """Return the only content of a kind among the outputs of a cell."""
    (content,) = [output.data[kind] for output in outputs if kind in output.get("data", {})]
    return str(content)


def _text(outputs: list[Any]) -> str:
    """Return what a cell printed and its value."""
    return "".join(output.get("text") or output.data["text/plain"] for output in outputs)
