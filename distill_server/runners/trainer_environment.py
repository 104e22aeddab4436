"""The environment variables of a trainer: the allowed variables, and the tokens of its attempt."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distill_server.runners.machine import Share
from protos.auth.scoped_token import scoped_token
from protos.rpc.channel import ROLLOUTS_TOKEN, TEACHER_TOKEN, token_of

_FILES = frozenset({"DISTILL_TLS_CA", "DISTILL_TLS_CERT", "DISTILL_TLS_KEY"})
_ALLOWED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}
    | {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    | {"TOKENIZERS_PARALLELISM"}
    # The address of object storage and the files with its credentials; not the keys themselves.
    | {"AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"}
    | {"AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"}
    | {"GOOGLE_APPLICATION_CREDENTIALS", "CLOUD_STORAGE_EMULATOR_ENDPOINT"}
    # Tokens are missing here: an attempt gets its own tokens, see `attempt_tokens`.
    | _FILES
)
_ALLOWED_PREFIXES = (
    *("LC_", "CUDA_", "NVIDIA_", "NCCL_", "HF_", "TORCH_", "PYTORCH_", "WANDB_"),
    *("VLLM_", "TRITON_", "GLOO_", "FI_", "UCX_"),
)
_REFUSED = frozenset({"VLLM_API_KEY"})


def allowed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a trainer may get; others, such as tokens, are dropped."""
    return {
        name: setting
        for name, setting in environment.items()
        if name in _ALLOWED or (name.startswith(_ALLOWED_PREFIXES) and name not in _REFUSED)
    }


def trainer_environment(
    environment: Mapping[str, str], share: Share, processes: int
) -> dict[str, str]:
    """Return the allowed variables of the server, with the GPUs and threads of `share` set.

    Paths of certificates become absolute: a trainer may have another working directory.
    PYTHONSAFEPATH is set, so that no Python below the trainer imports from its working directory.
    """
    variables = allowed_variables(environment)
    variables |= {
        name: os.path.abspath(variables[name])
        for name in _FILES & variables.keys()
        if variables[name]
    }
    if share.gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    fixed_variables = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    return {**variables, "OMP_NUM_THREADS": str(threads_of(share, processes)), **fixed_variables}


def without_trackers(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of experiment trackers, such as WANDB_API_KEY."""
    return {name: value for name, value in variables.items() if not name.startswith("WANDB_")}


def threads_of(share: Share, processes: int) -> int:
    """Return the number of CPU threads of each process, at least 1."""
    return max(1, share.cpus // processes)


def attempt_tokens(job_id: str, attempt: int) -> dict[str, str]:
    """Return $DISTILL_TEACHER_TOKEN and $DISTILL_ROLLOUTS_TOKEN of one attempt.

    A token that the server does not have is left out. Each token is valid only for this attempt. It
    is derived from the server's own token at the start of the attempt. So a new token in the
    server's file takes effect with the next attempt. Raises InvalidInput if a file cannot be read.
    """
    parents = {name: token_of(name) for name in (TEACHER_TOKEN, ROLLOUTS_TOKEN)}
    return {
        name: scoped_token(parent, job_id, attempt, rollouts=name == ROLLOUTS_TOKEN)
        for name, parent in parents.items()
        if parent
    }
