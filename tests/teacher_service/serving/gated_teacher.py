"""`distill-teacher` that stops in the middle of its weights until the file $GATE exists."""

from __future__ import annotations

import os
import time
from pathlib import Path

from teacher_service.models.load_progress import LoadProgress

if __name__ == "__main__":
    gate, set_share = Path(os.environ["GATE"]), LoadProgress.set_share

    def reach_and_stop(self: LoadProgress, share: float) -> None:
        set_share(self, share)
        while share >= 0.4 and not gate.exists():
            time.sleep(0.01)

    LoadProgress.set_share = reach_and_stop  # type: ignore[method-assign]
    from teacher_service.__main__ import main

    main()
