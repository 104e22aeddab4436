"""The evidence page: verdicts, gradients and shares against independent formulas."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.draws import training as on_policy
from benchmarks.draws.noise import Position
from benchmarks.evidence import page, real_methods
from benchmarks.evidence.anchors import SAMPLES, TRIES, pass_rates
from benchmarks.evidence.claims import Effect, overall_verdict, paired_differences
from benchmarks.evidence.gradients import renormalised_gradient
from benchmarks.evidence.memory import saved_bytes
from benchmarks.evidence.offline_k import OfflineLoss, QuestionAnswer, draw_tail_samples, mean_loss
from benchmarks.evidence.real_sections import compare_methods
from benchmarks.shared.process_memory import track_peak_of_children
from benchmarks.shared.results import add_run, load_results
from student_trainer.data.batch import ScoredSequence, make_batch, placeholder_rows
from student_trainer.data.sequence import Rollout
from student_trainer.losses import Direction
from student_trainer.model.loading import recompute_activations
from student_trainer.model.student import Student
from tests.student_trainer import tiny


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_gradient_of_the_renormalised_heads_is_that_of_autograd(direction: Direction) -> None:
    torch.manual_seed(0)
    logits = (2 * torch.randn(50, dtype=torch.float64)).requires_grad_()
    log_p, log_q = logits.log_softmax(0), torch.randn(50, dtype=torch.float64).log_softmax(0)
    head = (log_p if direction == "reverse" else log_q).topk(7).indices
    p, q = log_p[head].log_softmax(0), log_q[head].log_softmax(0)
    kl = (p.exp() * (p - q)).sum() if direction == "reverse" else (q.exp() * (q - p)).sum()
    (expected,) = torch.autograd.grad(kl, logits)
    gradient = renormalised_gradient(Position(log_p.detach(), log_q), direction, 7)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_pass_at_8_is_the_share_of_subsets_with_a_right_answer() -> None:
    texts = [["7"] * right + ["0"] * (SAMPLES - right) for right in (0, 1, 3, 16)]
    rates = pass_rates(texts, [{"answer": "7"}] * 4)
    shares = [
        statistics.mean("7" in subset for subset in itertools.combinations(answers, TRIES))
        for answers in texts
    ]
    assert rates["pass@8"] == pytest.approx(statistics.mean(shares), abs=1e-12)
    assert rates["pass@1"] == pytest.approx(20 / 64)
    assert rates["answers"] == pytest.approx((1 + 2 + 2 + 1) / 4)


def test_a_verdict_follows_from_the_interval() -> None:
    # Student's t of four values: mean +- 3.182 sd / 2.
    assert Effect("", [1.0, 2.0, 3.0, 4.0]).interval == pytest.approx((2.5, 3.182 * 1.2909944 / 2))
    assert Effect("", [1.0, 2.0, 3.0, 4.0]).verdict == "shown"
    assert Effect("", [-1.0, 2.0, 3.0, 4.0]).verdict == "not shown"
    assert Effect("", [-1.0, -2.0, -1.5, -1.2]).verdict == "refuted"
    assert Effect("", [1.0, 2.0, 3.0, 4.0], least=0.5).verdict == "not shown"
    assert Effect("", [5.0]).verdict == "not shown", "one seed shows nothing"
    effects = [Effect("", [1.0, 1.1]), Effect("", [0.0, 1.0])]
    assert overall_verdict(effects) == "not shown in 1, shown in 1"


def test_runs_are_paired_by_seed() -> None:
    runs = [
        {"way": loss, "seed": seed, "kl": seed + kl}
        for loss, kl in (("a", 1), ("b", 3))
        for seed in (0, 1)
    ]
    runs.append({"way": "b", "seed": 2, "kl": 9.0})
    assert paired_differences(runs, "kl", {"way": "b"}, {"way": "a"}) == [2, 2]


def test_results_of_other_settings_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    result = load_results(path, {"steps": 2})
    add_run(path, result, {"seed": 0})
    assert load_results(path, {"steps": 2})["runs"] == [{"seed": 0}]
    assert load_results(path, {"steps": 3})["runs"] == []


def test_the_losses_meet_the_exact_one_when_the_head_holds_all() -> None:
    torch.manual_seed(0)
    teacher, student = tiny.model(seed=0).float(), tiny.model(seed=1).float()
    vocabulary = student.config.vocab_size
    texts = [
        QuestionAnswer(torch.randint(vocabulary, (9,)), 3),
        QuestionAnswer(torch.randint(vocabulary, (6,)), 2),
    ]
    exact = mean_loss(OfflineLoss("exact"), student, teacher, texts)
    for loss in ("bucket", "none", "renormalised"):
        loss_value = mean_loss(OfflineLoss(loss, vocabulary), student, teacher, texts)
        torch.testing.assert_close(loss_value, exact, rtol=1e-5, atol=1e-6)


def test_tail_samples_are_outside_the_head() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    head = logits.topk(10).indices
    assert not (draw_tail_samples(logits, head)[:, :, None] == head[:, None, :]).any()


def test_fine_tuning_and_offline_learn_from_the_same_answers_of_the_teacher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher, student = (tiny.model(seed=seed, spread=0.2).float() for seed in (0, 1))
    # Fewer ids than those of the benchmark: the tiny models have 13.
    monkeypatch.setattr(real_methods, "OWN_ANSWERS", on_policy.TailLoss("bucket+draws", 4, 4))
    monkeypatch.setattr(real_methods, "OFFLINE", OfflineLoss("bucket+teacher_samples", 4))
    prompts = [tiny.prompt(1, 2, 3), tiny.prompt(4, 5)]
    losses_and_answers = {
        method: real_methods.mean_loss(
            real_methods.RealMethodSetting("GSM8K", 1e-4, method, 0),
            1,
            student,
            teacher,
            tiny.tokenizer(),
            prompts,
        )
        for method in ("sft", "offline", "on-policy")
    }
    (loss, texts), (_, offline_texts), (_, own_texts) = (
        losses_and_answers[name] for name in ("sft", "offline", "on-policy")
    )
    ids = [text.token_ids.tolist() for text in texts]
    assert ids == [text.token_ids.tolist() for text in offline_texts]
    assert ids != [text.token_ids.tolist() for text in own_texts]
    nats = [
        -student(text.token_ids[None].long())
        .logits[0, : len(text.token_ids) - 1]
        .log_softmax(1)
        .gather(1, text.token_ids[1:, None].long())[text.start - 1 :]
        for text in texts
    ]
    torch.testing.assert_close(loss, torch.cat(nats).mean(), rtol=1e-5, atol=1e-6)


def test_equal_flops_compare_a_part_of_the_curve_with_the_end_of_the_others() -> None:
    def run(method: str, *values: float) -> dict[str, object]:
        curve = [{"kl_own": value} for value in values]
        return {"task": "GSM8K", "method": method, "seed": 0, "curve": curve}

    runs = [run("on-policy", 3.0, 1.0), run("offline", 4.0), run("sft", 2.5), run("before", 9.0)]
    ends, equal_flops = (
        [effect.differences for effect in compare_methods(runs, "kl_own", "", point=point)[:2]]
        for point in (-1, 0)
    )
    assert ends == [[3.0], [1.5]]
    assert equal_flops == [[1.0], [-0.5]]


def test_the_bytes_saved_for_backward_are_those_of_the_layers() -> None:
    """Without recomputation, each of the layers adds the same; with it, its input alone."""
    sequences = []
    for _ in range(2):
        ids, head = torch.randint(12, (64,)), torch.zeros(63, 1, dtype=torch.int32)
        rollout = Rollout(ids, 1, head, torch.zeros(63), False, "")
        sequences.append(ScoredSequence(rollout, placeholder_rows(head.numpy())))
    batch = make_batch(sequences, torch.device("cpu"))
    bytes_by_case = {}
    for recomputed in (False, True):
        for layers in (1, 2, 3):
            model = tiny.model(layers=layers).float().train()
            recompute_activations(model, recomputed)
            bytes_by_case[recomputed, layers] = saved_bytes(Student(model, bf16=False), batch)
    for recomputed in (False, True):
        more = [
            bytes_by_case[recomputed, layers + 1] - bytes_by_case[recomputed, layers]
            for layers in (1, 2)
        ]
        assert more[0] == more[1] > 0
    assert bytes_by_case[True, 2] - bytes_by_case[True, 1] == 2 * 64 * 32 * 4, (
        "float32 input of a layer, width 32"
    )
    assert bytes_by_case[False, 2] - bytes_by_case[False, 1] > 10 * 2 * 64 * 32 * 4


def test_the_peak_of_children_is_noted_for_each_stage() -> None:
    code = (
        "import sys; b = b''; print(flush=True)\n"
        "for line in sys.stdin: b = b'x' * int(line); print(flush=True)"
    )
    stages = []
    with (
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        ) as child,
        track_peak_of_children(0.01, lambda: stages[-1] if stages else "start") as peak,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        for stage, size in (("large", 64 << 20), ("small", 1)):
            child.stdin.write(f"{size}\n")
            child.stdout.readline()
            stages.append(stage)
            while stage not in peak.stages:
                pass
        child.stdin.close()
    assert peak.stages["large"] - peak.stages["small"] > 50 << 20
    assert peak.bytes == max(peak.stages.values())


@pytest.mark.slow
def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    """Nobody edits a verdict by hand."""
    pytest.importorskip("matplotlib")
    page.main(["--docs", str(tmp_path)])
    root = Path(__file__).parents[2]
    assert (tmp_path / "evidence.md").read_text() == (root / "docs" / "evidence.md").read_text()
    assert json.loads((root / "benchmarks/results/evidence_anchors.json").read_text())["runs"]
