"""`distill-teacher` with a budget of 32 MiB for the answers of all streams."""

from __future__ import annotations

from teacher_service.serving import answer_budget

if __name__ == "__main__":
    answer_budget.MAX_ANSWER_BYTES = 32 << 20
    from teacher_service.__main__ import main

    main()
