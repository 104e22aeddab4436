"""Writes docs/step-time.md, its picture, and the predictions for the recipes for 8 GPUs.

The predictions are in the recipes and, as the output of `distill plan`, in docs/training.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.shared.pages import format_table, write_page
from benchmarks.shared.pictures import BLUE, GREY, RED, draw_figure, style_axis
from benchmarks.shared.programs import JOBS, ROOT
from clients.config.file import load_job
from clients.config.kinds import AnyTraining
from clients.config.tables.job import TrainingJob
from clients.data.models.shape import ModelShape
from clients.plan.machines import MACHINES, MachineFigures
from clients.plan.memory_plan import load_of
from clients.plan.memory_report import step_lines
from clients.plan.step_time import Split, StepTime, best_split, step_time

PAGE, PICTURE = ROOT / "docs" / "step-time.md", ROOT / "docs" / "step-time.png"
GUIDE, GUIDE_RECIPE = ROOT / "docs" / "training.md", "rl_maths_8gpu"
# The recipes, and the published sizes of their students.
RECIPES = {
    "rl_maths_8gpu": ModelShape(28, 1536, 8960, 12, 2, 128, 151936, query_bias=True),
    "rl_search_8gpu": ModelShape(36, 2048, 11008, 16, 2, 128, 151936, tied=True, query_bias=True),
}
RECIPE_MACHINE = "H100"
TOLERANCE = 0.2
_PARTS = ("rollouts", "teacher", "trainer", "push")
_MACHINE_HEADER = [
    "machine", "bfloat16, TFLOP/s", "float32", "memory, TB/s", "GiB", "link, GB/s",
    "network, GB/s", "host, GB/s", "attention", "products", "reads", "other traffic",
    "launch, ms a layer", "a token", "vLLM",
]  # fmt: skip
_RECIPE_HEADER = [
    "recipe", "8 x", "seconds a step", "trainer", "rollouts", "bottleneck", "best split", "seconds",
]  # fmt: skip
_MODEL = [
    [
        "trainer",
        "operations of the matrix products (forward 2 per weight and token, backward 4, recomputed"
        " layers 2 more; attention by the length of a sequence) / rate, plus bytes of activations,"
        " logits, gradients and optimizer / rate; for the anchor and p_old a forward pass",
    ],
    [
        "between GPUs",
        "bytes of FSDP2's gathered weights and scattered gradients, or of DDP's all-reduce / rate;"
        " a GPU computes meanwhile, so the longer of both counts",
    ],
    [
        "rollouts",
        "for each token, the longest of three: reads of all weights and of the keys and values of"
        " the answers in progress / rate, matrix products, launches by the host; plus the bytes of"
        " the records of a token / rate; plus the forward pass of the prompts",
    ],
    ["teacher", "a forward pass over all tokens of the step, in batches of 16,384 tokens"],
    ["push", "bytes of the weights in the compute dtype, from GPU to host and to the engines"],
]
_OUTPUT = re.compile(r"^Predicted for .*\nBest split of the GPUs: .*\n", re.MULTILINE)
_PREDICTION = re.compile(r"^# Predicted by .*?has measured it\.\n", re.MULTILINE | re.DOTALL)


def write(result: Mapping[str, Any]) -> None:
    """Write the page and the picture of the results, and the predictions of the recipes."""
    print(write_page(PAGE, format_page(result)))
    if result["runs"]:
        print(draw_figure(PICTURE, lambda _, axes: _plot(axes[0][0], result), size=(7, 6)))
    for name in RECIPES:
        path = JOBS / f"{name}.toml"
        path.write_text(with_prediction(path.read_text(), name))
    GUIDE.write_text(with_output(GUIDE.read_text()))


def recipe(name: str) -> AnyTraining:
    """Return the job of a recipe."""
    job = load_job(JOBS / f"{name}.toml", []).config
    assert isinstance(job, TrainingJob)
    return job  # type: ignore[return-value]


def predict_recipe(name: str, machine: MachineFigures) -> tuple[StepTime, Split, StepTime]:
    """Return the time of a recipe's step, and its best split of the GPUs with the time of it."""
    job, shape = recipe(name), RECIPES[name]
    split = best_split(job, shape, machine, None)
    assert split is not None
    return step_time(job, shape, load_of(job, shape), machine), *split


def with_prediction(text: str, name: str) -> str:
    """Return the text of a recipe with its prediction in a comment."""
    time, split, best = predict_recipe(name, MACHINES[RECIPE_MACHINE])
    job = recipe(name)
    parts = sorted(time.parts, key=lambda part: -time.parts[part])[:2]
    sentence = (
        f"# Predicted by `distill plan` for {job.gpus} {RECIPE_MACHINE}: {time.seconds:.3g} s per"
        f" step with answers of {job.method.max_new_tokens:,} tokens\n"
        f"# ({', '.join(f'{part} {time.parts[part]:.3g} s' for part in parts)}); best split"
        f" {split.trainer} + {split.engines}: {best.seconds:.3g} s. No GPU has measured it.\n"
    )
    return _replace_once(_PREDICTION, sentence, text)


def with_output(text: str) -> str:
    """Return the text of docs/training.md with the output of `distill plan` about time."""
    time, split, best = predict_recipe(GUIDE_RECIPE, MACHINES[RECIPE_MACHINE])
    lines = step_lines(RECIPE_MACHINE, time, (split, best))
    return _replace_once(_OUTPUT, "\n".join(lines).lstrip() + "\n", text)


def _replace_once(pattern: re.Pattern[str], new: str, text: str) -> str:
    changed, count = pattern.subn(lambda _: new, text)
    assert count == 1, f"{count} places match {pattern.pattern}"
    return changed


def format_page(result: Mapping[str, Any]) -> str:
    """Return the text of docs/step-time.md."""
    runs = result["runs"]
    figures = {name: _figure_row(name, machine) for name, machine in MACHINES.items()}
    if runs:
        figures["CPU"] = _figure_row("one core of a CPU, measured", _median_figures(runs))
    recipes = [
        _recipe_row(name, machine, *predict_recipe(name, figures_of_machine))
        for name in RECIPES
        for machine, figures_of_machine in MACHINES.items()
    ]
    return f"""\
# The time of a step

<!-- `python -m benchmarks.models.step_time` writes this page; change step_time_page.py there. -->

`distill plan` predicts the seconds of a step, the part that takes the longest (the bottleneck), and
the split of the GPUs among trainer, rollout engines and teacher with the shortest step
([Training on 8 GPUs](training.md#memory)). This page describes the model, lists the figures of the
machines, and compares predictions with measured jobs. **No GPU has measured these predictions.**

## The model

The formulas are in [clients/plan/step_time.py](../clients/plan/step_time.py). Their inputs are the
sizes in the config.json of the models, the keys of the job, and the figures of a machine:

{format_table(["part", "seconds"], _MODEL)}

The trainer waits for the first batch of rows only. With `rollouts.lag = 1`, the rollouts of the
next step run while the trainer learns; with a lag of 2, the teacher scores them meanwhile, too. A
CPU core overlaps nothing: products, reads and launches add up. Answers have the maximum length, so
the prediction is an upper bound for a job whose answers end early.

## The machines

Peaks are from NVIDIA's data sheets (dense), the network from those of the DGX systems. The shares
of the peaks and the launches are assumptions. The row of the CPU is the median of the calibrations
of the benchmark; its rates are those that programs reach.

{format_table(_MACHINE_HEADER, figures.values())}

## Predicted and measured

{_format_comparison(result)}
## The recipes for 8 GPUs

[rl_maths_8gpu](../deploy/jobs/rl_maths_8gpu.toml) and
[rl_search_8gpu](../deploy/jobs/rl_search_8gpu.toml) with their own split (4 GPUs train, 4 sample),
and with the best split. Answers have the maximum length:

{format_table(_RECIPE_HEADER, recipes)}
"""


def _figure_row(name: str, machine: MachineFigures) -> list[str]:
    """Return a row of the table of machines. A CPU's figures are rates, so it has no shares."""
    attention = f"{machine.attention_share:.0%}"
    shares = [machine.product_share, machine.memory_share, machine.elementwise_share]
    rates = [machine.bf16 / 1e12, machine.float32 / 1e12, machine.memory / 1e12]
    if not machine.overlaps:
        shared = ["", "", f"{machine.elementwise_share:.0%}"]
        links = ["", "", "", f"{machine.host / 1e9:.0f}"]
    else:
        shared = [f"{share:.0%}" for share in shares]
        links = [
            str(machine.size),
            *(f"{rate / 1e9:.0f}" for rate in (machine.link, machine.network, machine.host)),
        ]
    launches = (machine.layer_launch, machine.token_launch, machine.engine_launch)
    return [
        name,
        *(f"{rate:.4g}" for rate in rates),
        *links,
        attention,
        *shared,
        *(f"{1e3 * seconds:.2g}" for seconds in launches),
    ]


def _median_figures(runs: Sequence[Mapping[str, Any]]) -> MachineFigures:
    names = runs[0]["figures"]
    return MachineFigures(
        **{
            name: median(run["figures"][name] for run in runs)
            if isinstance(names[name], float)
            else names[name]
            for name in names
        }
    )


def _recipe_row(name: str, machine: str, time: StepTime, split: Split, best: StepTime) -> list[str]:
    return [
        name,
        machine,
        f"{time.seconds:.3g}",
        f"{time.parts['trainer']:.3g}",
        f"{time.parts['rollouts']:.3g}",
        time.bottleneck,
        f"{split.trainer} + {split.engines}",
        f"{best.seconds:.3g}",
    ]


def _format_comparison(result: Mapping[str, Any]) -> str:
    """Return the comparison with jobs: a sentence, a table and a picture."""
    runs = result["runs"]
    if not runs:
        return "`python -m benchmarks.models.step_time` has not been run on an idle machine yet.\n"
    ratios = [ratio_of(run) for run in runs]
    near = [abs(ratio - 1) <= TOLERANCE for ratio in ratios]
    rows = [
        [
            run["case"],
            *(f"{run['parts'][part]:.2f}" if part in run["parts"] else "" for part in _PARTS),
            f"{run['predicted']:.2f}",
            f"{run['measured']['step']:.2f}",
            f"{ratio:.2f}" if is_near else f"**{ratio:.2f}**",
        ]
        for run, ratio, is_near in zip(runs, ratios, near, strict=True)
    ]
    loads = [run["load_average"] for run in runs]
    outside = [run["case"] for run, is_near in zip(runs, near, strict=True) if not is_near]
    verdict = (
        f"{sum(near)} of {len(runs)} predictions are within {TOLERANCE:.0%} of the measured time."
    )
    if outside:
        verdict += f" Outside: {'; '.join(outside)}."
    return f"""\
Each row is a real job ({result["machine"]}; load average {min(loads):.1f} to {max(loads):.1f} at
the start of the jobs): students with random weights in float32, one thread for each process, and
the figures of the CPU from before and after the job. The measured time is the median of
`time/step`. Seconds of the predicted parts, and of the step:

{format_table(["job", *_PARTS, "predicted", "measured", "ratio"], rows)}

{verdict} Predicted over measured: median {median(ratios):.2f}, {min(ratios):.2f} to
{max(ratios):.2f}.

![Predicted and measured seconds of a step](step-time.png)
"""


def ratio_of(run: Mapping[str, Any]) -> float:
    """Return predicted seconds of a step by measured seconds."""
    ratio: float = run["predicted"] / run["measured"]["step"]
    return ratio


def _plot(axis: Any, result: Mapping[str, Any]) -> None:
    """Plot predicted over measured seconds, on two logarithmic axes."""
    runs = result["runs"]
    measured = [run["measured"]["step"] for run in runs]
    predicted = [run["predicted"] for run in runs]
    ends = [0.8 * min(*measured, *predicted), 1.25 * max(*measured, *predicted)]
    axis.fill_between(
        ends, [(1 - TOLERANCE) * end for end in ends], [(1 + TOLERANCE) * end for end in ends],
        color=GREY, alpha=0.2, linewidth=0, label="within 20%",
    )  # fmt: skip
    axis.plot(ends, ends, color=GREY, linewidth=1)
    samples = ["rollouts" in run["parts"] for run in runs]
    for label, color, kind in (("with rollouts", RED, True), ("without rollouts", BLUE, False)):
        points = [
            pair
            for *pair, is_sampled in zip(measured, predicted, samples, strict=True)
            if is_sampled == kind
        ]
        axis.scatter(*zip(*points, strict=True), color=color, label=label, zorder=3)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter("{x:g}")
    axis.set(xlabel="measured seconds of a step", ylabel="predicted seconds of a step")
    style_axis(axis)
    axis.legend(frameon=False)
