"""Compiles both Triton kernels of the loss for three GPUs, without a GPU, and prints resources.

    python -m tests.student_trainer.losses.fused.compiled_kernels

One line of JSON per form: kernel, target (sm_80, sm_90, sm_100), whether the curve has a cap, then
registers and bytes of stack and local memory (spills) per thread, and bytes of shared memory per
block. A process of its own, because Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from student_trainer.losses.fused import softmax_triton

TARGETS = (80, 90, 100)
_DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_BLOCK = 4096
_SCALARS = {"stride": "i32", "out_stride": "i32", "columns": "i32"}
_DIVISIBLE = {"logits", "out", "top", "scale", "top_out", "total_out", "weighted_out", "stride"}
_DIVISIBLE |= {"out_stride", "columns"}


def compile_form(kernel: Any, target: int, capped: bool) -> Any:
    """Return the compiled kernel for float32 logits with aligned rows, and a bfloat16 gradient."""
    types = {"out": "*bf16", "width": "fp32", "height": "fp32", **_SCALARS}
    constants = {"CAPPED": capped, "BLOCK": _BLOCK}
    names = kernel.arg_names
    signature = {name: types.get(name, "*fp32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if n in _DIVISIBLE},
    )
    return triton.compile(source, target=GPUTarget("cuda", target, 32))


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
    for kernel in (softmax_triton._statistics, softmax_triton._scaled_exp):
        for target in TARGETS:
            for capped in (False, True):
                form = {"kernel": kernel.fn.__name__, "target": target, "capped": capped}
                yield {**form, **read_resources(compile_form(kernel, target, capped))}


if __name__ == "__main__":
    for row in list_forms():
        print(json.dumps(row), flush=True)
