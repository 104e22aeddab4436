"""The benchmarks of the loss: the compared methods have exact gradients; the commands run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import benchmark as gpu
from benchmarks.loss import benchmark as loss
from benchmarks.loss import ema_pg, estimators, long_sequences
from benchmarks.loss import methods as loss_methods
from benchmarks.loss.bounds import check_bounds
from benchmarks.loss.methods import GPU_METHODS, METHODS
from benchmarks.loss.problem import MissingPackage, Problem, make_problem
from benchmarks.shared.meters import CpuMeter, measure
from student_trainer.losses import exact_kl, topk_kl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OURS = ("fused", "fused, recompute", "fused, plain torch passes")
PUBLISHED = [name for name in METHODS if name.startswith("published formula")]
LABELS = ("chunked cross-entropy", "torch's chunked linear cross-entropy")
PRODUCTS = ("three products", "three products, chunked")


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile takes longer than all the rest."""
    monkeypatch.setattr(ema_pg, "_compile", lambda function: function)


def gradients(run: loss_methods.Method, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    problem.clear()
    try:
        run(problem)
    except MissingPackage as reason:
        pytest.skip(str(reason))
    assert problem.hidden.grad is not None
    assert problem.weight.grad is not None
    return problem.hidden.grad, problem.weight.grad


def require_same_gradients(
    run: loss_methods.Method, oracle: loss_methods.Method, problem: Problem, within: float
) -> None:
    for gradient, expected_gradient in zip(
        gradients(run, problem), gradients(oracle, problem), strict=True
    ):
        assert (gradient - expected_gradient).norm() <= within * expected_gradient.norm()


@pytest.mark.parametrize("name", [*METHODS, *(name for name in GPU_METHODS if name not in METHODS)])
def test_each_method_has_the_gradients_that_its_name_says(name: str) -> None:
    """A peer that computed less than its loss would be no peer."""
    run = (METHODS | GPU_METHODS)[name]
    problem = make_problem(150, 600, 32, 8)
    if name in OURS:
        require_same_gradients(run, loss_methods.plain, problem, 1e-5)
    elif name in PUBLISHED:
        require_same_gradients(run, published, problem, 1e-5)
    elif name in LABELS or name == "Liger, cross-entropy":
        require_same_gradients(run, loss_methods.cross_entropy, problem, 1e-5)
    elif name in PRODUCTS:
        require_same_gradients(run, products, problem, 1e-5)
    elif name.startswith("TRL"):
        require_same_gradients(run, reverse_kl, problem, 1e-4)
    elif name == "log_softmax + bucket formula":
        # Its 1 - sum has lost digits of the tail.
        require_same_gradients(run, bucket, problem, 1e-3)
    else:
        assert name == "cross-entropy"


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "EMA-PG" in name])
def test_the_peers_that_a_gpu_gets_are_right_in_half_precision(name: str) -> None:
    """bf16 takes the passes of flash-attn's kernel, in place or not."""
    problem = make_problem(64, 300, 32, 8, dtype=torch.bfloat16)
    require_same_gradients(METHODS[name], loss_methods.published_minimal, problem, 0.03)


def published(p: Problem) -> None:
    rows = loss_methods.rows_from_logits(p.hidden @ p.weight.T, p.head_ids, p.token_ids)
    topk_kl(rows, p.teacher, p.in_head, direction="reverse", tail="published").sum().backward()


def bucket(p: Problem) -> None:
    rows = loss_methods.rows_from_logits(p.hidden @ p.weight.T, p.head_ids, p.token_ids)
    topk_kl(rows, p.teacher, p.in_head, direction="reverse", tail="bucket").sum().backward()


def reverse_kl(p: Problem) -> None:
    teacher = (p.teacher_hidden @ p.weight.T).detach()
    exact_kl(p.hidden @ p.weight.T, teacher, direction="reverse").sum().backward()


def products(p: Problem) -> None:
    """Logits as their own gradient."""
    (p.hidden @ p.weight.T).square().sum().div(2).backward()


def test_a_narrower_head_has_the_rows_of_its_own() -> None:
    wide, narrow = make_problem(20, 300, 16, 32), make_problem(20, 300, 16, 5)
    cut = wide.with_head(5)
    assert torch.equal(cut.head_ids, narrow.head_ids)
    for name in ("head_logprobs", "tail_logmass", "token_logprobs"):
        torch.testing.assert_close(getattr(cut.teacher, name), getattr(narrow.teacher, name))


def test_a_bound_that_is_not_met_is_said() -> None:
    seconds = {"fused": 1.0, "chunked cross-entropy": 0.9, "three products": 1.0}
    result = {
        "time": {n: {"seconds": s} for n, s in {**seconds, "cross-entropy": 1.0}.items()},
        "k": {
            k: {"seconds": 1.0, "gradient_error": 1e-6, "autograd_error": 1e-6}
            for k in ("32", "512")
        },
        "memory": [
            {"method": "fused", "tokens": n, "mib": m} for n, m in ((1, 70), (2, 72), (4, 80))
        ],
    }
    met = {row["bound"]: row["met"] for row in check_bounds(result, 74.0)}
    assert met["time over three products"]
    assert not met["time over chunked cross-entropy"]
    assert met["memory over one chunk of logits"]


def test_the_estimators_page_is_what_its_figures_say(tmp_path: Path) -> None:
    result = json.loads((ROOT / "benchmarks/results/estimators.json").read_text())
    assert (ROOT / "docs/estimators.md").read_text() == estimators.format_page(result)
    page = tmp_path / "page.md"
    estimators.main(
        ["--vocabulary", "150", "--out", str(tmp_path / "found.json"), "--page", str(page)]
    )
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert {row["tail"] for row in rows} == set(estimators.TAILS)
    for row in rows:
        biased = row["tail"] in ("none", "bucket", "published")
        assert (row["gradient_bias"] > 1e-9) == biased, row
        assert row["value_bias"] < 1e-12 or row["tail"] in ("none", "bucket"), row
    assert "| `bucket+sampled` | 0 | 0 |" in page.read_text()


def run_command(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_the_loss_benchmark_at_small_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "loss.json"
    loss.main(["--quick", "--out", str(out)])
    result = json.loads(out.read_text())
    assert set(result["time"]) | set(result["missing"]) == set(METHODS)
    assert [row["tokens"] for row in result["memory"]] == [256, 160, 512]
    assert all(row["mib"] > 0 for row in result["memory"])
    assert all(row["gradient_error"] < 1e-5 for row in result["k"].values())


def test_the_gpu_benchmark_at_small_sizes_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--device", "cpu", "--quick", "--out", str(out)])
    result = json.loads(out.read_text())
    assert {row["method"] for row in result["loss"]} | set(result["missing"]) == set(GPU_METHODS)
    assert all("ms" in row for part in ("loss", "scoring", "selection") for row in result[part])


def test_work_that_fails_is_a_row_that_says_why() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 EiB")

    assert measure(CpuMeter(), fail) == {"failed": "out of memory"}


def test_without_a_gpu_the_gpu_command_says_so() -> None:
    process = run_command("benchmarks.gpu")
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert "needs a CUDA device" in process.stderr


def test_the_gpu_target_needs_no_network_with_a_python_of_the_machine() -> None:
    command = ["make", "-n", "bench-gpu", f"GPU_PYTHON={sys.executable}"]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = plan.splitlines()
    assert len(lines) == 5
    assert all(line.startswith(f"{sys.executable} -m benchmarks.") for line in lines)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_command_measures_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    gpu.main(["--quick", "--out", str(out)])
    result = json.loads(out.read_text())
    for part in ("loss", "scoring", "selection"):
        assert all(row["peak_mib"] >= 0 for row in result[part]), result[part]


@pytest.mark.usefixtures("forked_python")
def test_a_long_sequence_has_one_loss_on_both_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "long.json"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["long_sequences", "--quick", "--out", str(out)])
    long_sequences.main()
    result = json.loads(out.read_text())
    assert result["loss_difference"] < 1e-5
    assert result["gradient_norm_difference"] < 1e-4
    assert all(path["peak_mib"] > 0 for path in result["paths"].values())
    assert result["paths"]["plain"]["rows"] == result["paths"]["fused"]["rows"] == 511
