"""A snapshot: the student's weights of one version, as files that a rollout engine loads.

    model*.safetensors    the weights under the names of the model's own format; or, for a student
                          with adapters (LoRA), in peft's format:
    adapter_model.safetensors, adapter_config.json
    probe.safetensors     token_ids [n, T] int64 and logprobs [n, T - 1] float32: the trainer's
                          log-prob in nats of each token except the first, at temperature 1
    snapshot.json         {"number": ..., "dtype": ..., "files": {name: xxh3_128 of its bytes}}

`snapshot.json` is written last and atomically, so a directory with this file is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from clients.runs.directory import replace_file
from protos.errors import Corrupt
from protos.rpc.failpoints import failpoint

_INFO_FILE = "snapshot.json"
_PROBE_FILE = "probe.safetensors"
_WEIGHTS_SUFFIX = ".safetensors"
_ADAPTER_CONFIGURATION = "adapter_config.json"
_BLOCK_BYTES = 1 << 23  # bytes that are read at once

# Largest difference between the log-probs of trainer and engine, in nats. In float32 two programs
# with the same weights differ by rounding only; weights of another version differ by more.
MAX_DIFFERENCE = {"float32": 1e-3}
# Limit of the mean: in bfloat16, rounding differs by about 0.03 per token, more if unlikely.
MAX_MEAN_DIFFERENCE = 0.1


@dataclass(frozen=True)
class Probe:
    """Token sequences with the trainer's log-probs of their tokens; see the module docstring."""

    token_ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot.

    - directory: the directory of its files.
    - number: the number of the version.
    - dtype: the dtype of the trainer's computation, float32 or bfloat16.
    - files: the digest of each file by name.
    """

    directory: Path
    number: int
    dtype: str
    files: Mapping[str, str]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) for all weights, on the CPU, file by file."""
        for name in self._weight_files():
            with safe_open(self.directory / name, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (the file is no mapping)
                    yield key, file.get_tensor(key)
            failpoint("weight-file-read")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight by name. Reads only the headers of the files."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in self._weight_files():
            with safe_open(self.directory / name, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (the file is no mapping)
                    shapes[key] = tuple(file.get_slice(key).get_shape())
        return shapes

    def probe(self) -> Probe:
        """Return the probe that is stored in the snapshot."""
        tensors = load_file(self.directory / _PROBE_FILE)
        return Probe(tensors["token_ids"], tensors["logprobs"])

    def _weight_files(self) -> list[str]:
        return [
            name for name in self.files if name.endswith(_WEIGHTS_SUFFIX) and name != _PROBE_FILE
        ]


def seal(directory: Path, *, number: int, dtype: str, probe: Probe) -> None:
    """Complete a snapshot: write the probe and snapshot.json to `directory`.

    The files of the weights must already be in `directory`. `number` and `dtype` are described in
    `Snapshot`. Raises OSError.
    """
    probe_tensors = {"token_ids": probe.token_ids, "logprobs": probe.logprobs}
    (directory / _PROBE_FILE).write_bytes(save(probe_tensors))  # `save_file` raises no OSError
    files = {
        file.name: _digest_file(file)
        for file in sorted(directory.iterdir())
        if file.name.endswith(_WEIGHTS_SUFFIX) or file.name == _ADAPTER_CONFIGURATION
    }
    facts = {"number": number, "dtype": dtype, "files": files}
    replace_file(directory / _INFO_FILE, json.dumps(facts, indent=1))


def open_snapshot(directory: Path) -> Snapshot:
    """Return the snapshot in `directory`. Raises Corrupt if it is incomplete or damaged.

    Reads every byte once, to compare the digests. A snapshot that names a file outside `directory`,
    or has a symbolic link to one, is refused with Corrupt; such a file is never read.
    """
    try:
        facts = json.loads((directory / _INFO_FILE).read_text())
        snapshot = Snapshot(directory, facts["number"], facts["dtype"], facts["files"])
        real_directory = directory.resolve()
        for name in snapshot.files:
            if (real_directory / name).resolve().parent != real_directory:
                raise Corrupt(f"{directory} names {name!r}, a file outside the directory")
        damaged_files = [
            name
            for name, digest in snapshot.files.items()
            if _digest_file(real_directory / name) != digest
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(
            f"{directory} is not a complete snapshot of weights: {error}",
            hint="the rollout service must see the trainer's directory: use one machine or a "
            "shared disk",
        ) from error
    if damaged_files:
        raise Corrupt(f"{directory}: the checksum of {damaged_files[0]} does not match")
    return snapshot


def verify(probe: Probe, logprobs_of: Callable[[Tensor], Tensor], dtype: str) -> float:
    """Compare the log-probs of an engine with those of the trainer; return the largest difference.

    - probe: token sequences with the trainer's log-probs.
    - logprobs_of: a function that returns the engine's log-probs [n, T - 1] float32 of token ids
      [n, T].
    - dtype: the dtype of the trainer's computation.

    The difference is in nats. Raises Corrupt if it is larger than rounding in `dtype` can explain.
    """
    differences = (logprobs_of(probe.token_ids) - probe.logprobs).abs()
    maximum, mean = float(differences.max()), float(differences.mean())
    limit = MAX_DIFFERENCE.get(dtype)
    is_different = maximum > limit if limit is not None else mean > MAX_MEAN_DIFFERENCE
    if is_different or not torch.isfinite(differences).all():
        raise Corrupt(
            f"the engine's log-probs of the probe differ from the trainer's by {mean:.3g} nats in "
            f"the mean and {maximum:.3g} at most, so the engine does not have the weights of"
            f" this version",
            hint="start the rollout service again; if the error recurs, use rollouts.engine = 'hf'",
        )
    return maximum


def _digest_file(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
