"""The options that only `distill-rollouts` has, with their help texts."""

from __future__ import annotations

from typing import Annotated

import typer

EngineOption = Annotated[str, typer.Option(help="Engine that samples: hf (transformers) or vllm.")]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Dtype of the computation, as student.dtype of the job: float32, bfloat16, or auto"
        " (bfloat16 on a GPU that has it)."
    ),
]
LoraRankOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Rank of the student's adapters, student.lora.rank of the job: only the adapters are"
        " loaded again and again. Default: all weights are, with the adapters merged into them.",
    ),
]
MaxBatchTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Largest number of tokens of a step of the engine (vllm). Default: 16384. With hf,"
        " each order has its own.",
    ),
]
SleepOption = Annotated[
    bool,
    typer.Option(
        "--sleep",
        help="Free the memory of the GPUs while the trainer learns (vllm, on the trainer's GPUs,"
        " with rollouts.lag = 0).",
    ),
]
RevisionOption = Annotated[str | None, typer.Option(help="Commit of the hub id.")]
EndWithParentOption = Annotated[
    int | None,
    typer.Option(
        hidden=True, metavar="PID", help="End when this process ends, which has started this one."
    ),
]
