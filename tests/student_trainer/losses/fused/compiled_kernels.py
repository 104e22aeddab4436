"""Compiles both Triton kernels of the loss for three GPUs, without a GPU, and prints resources.

    python -m tests.student_trainer.losses.fused.compiled_kernels [--write-page]

One line of JSON per form: kernel, target (sm_80, sm_90, sm_100), whether the curve has a cap,
whether rows are aligned to 16 elements (not with a padded vocabulary), then registers and bytes of
stack and local memory (spills) per thread, and bytes of shared memory per block. `--write-page`
writes the table of docs/gpu.md. Triton's cache keeps the forms until a kernel changes. A process of
its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.shared.pages import format_table
from student_trainer.losses.fused import softmax_triton
from tests.architecture.reference import insert_reference

PAGE = Path(__file__).parents[4] / "docs" / "gpu.md"
TARGETS = (80, 90, 100)
KERNELS = (softmax_triton._statistics, softmax_triton._scaled_exp)
_DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_POINTERS = {"logits", "out", "top", "scale", "top_out", "total_out", "weighted_out"}
_SIZES = {"stride", "out_stride", "columns"}


def compile_form(kernel: Any, target: int, capped: bool, aligned: bool) -> Any:
    """Return the compiled kernel for float32 logits and a bfloat16 gradient."""
    types = {"out": "*bf16", "width": "fp32", "height": "fp32", **dict.fromkeys(_SIZES, "i32")}
    constants = {"CAPPED": capped, "BLOCK": softmax_triton.LAUNCH.block}
    names = kernel.arg_names
    divisible = _POINTERS | _SIZES if aligned else _POINTERS
    signature = {name: types.get(name, "*fp32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if n in divisible},
    )
    options = softmax_triton.LAUNCH.options
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def read_resources(compiled: Any) -> dict[str, int]:
    """Return registers, stack, shared and local bytes of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_DUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    values = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert values is not None, text
    names = ("registers", "stack", "shared", "local")
    resources = dict(zip(names, map(int, values.groups()), strict=True))
    return resources | {"shared": resources["shared"] + compiled.metadata.shared}


def list_forms() -> Iterator[dict[str, Any]]:
    """Yield the resources of each form."""
    for kernel, target, capped, aligned in product(KERNELS, TARGETS, (False, True), (True, False)):
        form = {"kernel": kernel.fn.__name__, "target": target, "capped": capped}
        compiled = compile_form(kernel, target, capped, aligned)
        yield {**form, "aligned": aligned, **read_resources(compiled)}


def resource_table(forms: Sequence[dict[str, Any]]) -> str:
    """Return the section of the page: one line per kernel, and per target its registers."""
    lines = []
    keys = ("kernel", "capped", "aligned")
    for key in dict.fromkeys(tuple(form[name] for name in keys) for form in forms):
        same = [form for form in forms if tuple(form[name] for name in keys) == key]
        kernel, capped, aligned = key
        lines.append(
            [
                f"`{kernel.removeprefix('_')}`",
                "yes" if capped else "no",
                "aligned" if aligned else "padded",
                *(str(form["registers"]) for form in same),
                str(max(form["stack"] + form["local"] for form in same)),
                str(max(form["shared"] for form in same)),
            ]
        )
    registers = [f"registers, sm_{target}" for target in TARGETS]
    header = ["kernel", "cap", "rows", *registers, "bytes spilled", "bytes shared"]
    return f"Compiled by Triton {triton.__version__}:\n\n{format_table(header, lines)}"


def main(arguments: Sequence[str]) -> None:
    forms = list(list_forms())
    for form in forms:
        print(json.dumps(form))
    if "--write-page" in arguments:
        PAGE.write_text(insert_reference(PAGE.read_text(), resource_table(forms) + "\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
