"""The environment of every test, set before any test imports torch, Triton or gRPC."""

import os
import shutil

import protos  # noqa: F401  # so that gRPC leaves forked processes alone

# One thread a test worker: several workers share the processors, and idle threads of OpenMP spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton runs in Python where there is no GPU; it decides when it is first imported.
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
