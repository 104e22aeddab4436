"""Triton runs in Python where there is no GPU. It decides when it is first imported, by any test."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
