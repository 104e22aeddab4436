"""Means of metrics: only gradient_sd is the root of a mean."""

from student_trainer.loop.step import compute_means


def test_only_gradient_sd_is_a_root() -> None:
    means = compute_means(
        {
            "topk/gradient_sd": (8.0, 2.0),
            "topk/anchor_gradient_sd": (18.0, 2.0),
            "kl/teacher/x_sd": (-1.0, 4.0),
            "kl/teacher/gradient_sd": (-1.0, 4.0),
            "entropy": (3.0, 0.0),
        }
    )
    assert means == {
        "topk/gradient_sd": 2.0,
        "topk/anchor_gradient_sd": 3.0,
        "kl/teacher/x_sd": -0.25,
        "kl/teacher/gradient_sd": -0.25,
    }
