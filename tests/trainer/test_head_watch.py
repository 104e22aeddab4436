from __future__ import annotations

import pytest

from student_trainer.head_watch import HeadWatch


def test_a_head_that_empties_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = HeadWatch()
    for step, mass in enumerate((0.8, 0.9, 0.41, 0.39, 0.1), 1):
        watch.see(step, {"topk/student_mass": mass})
        watch.see(step, {"loss": 1.0})
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 4"]
    assert "0.39" in caplog.text
    assert "0.80" in caplog.text


def test_a_small_head_that_stays_is_not(caplog: pytest.LogCaptureFixture) -> None:
    watch = HeadWatch()
    for step in range(5):
        watch.see(step, {"topk/student_mass": 0.1})
    assert not caplog.records
