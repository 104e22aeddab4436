"""A job that needs a package of an extra is refused without it, before it is queued."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from clients.config.kinds import parse_job
from clients.config.tables.common import StudentConfig
from clients.preflight import packages
from clients.preflight.packages import check_attention, check_packages
from protos import extras
from protos.errors import InvalidInput


@pytest.mark.parametrize("installed", ["", "flash_attn", "flash_attn_interface", "kernels"])
def test_flash_attention_needs_a_package(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: name == installed or None)
    check_attention(StudentConfig(model="m"))
    flash = StudentConfig(model="m", attention="flash")
    if installed:
        check_attention(flash)
        return
    with pytest.raises(InvalidInput, match="needs the package flash-attn") as caught:
        check_attention(flash)
    assert caught.value.field == "student.attention"


def test_moments_in_8_bits_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"student": {"model": "m"}, "data": {"path": "p.jsonl"}, "train": {}}
    narrow = {**job, "train": {"optimizer": "adamw_8bit"}}
    listed = ["torchao>=0.18; extra == '8bit'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: listed)
    monkeypatch.setattr(extras, "_is_installed", lambda name: name != "torchao")
    check_packages(parse_job(json.dumps(job)))
    with pytest.raises(InvalidInput, match="adamw_8bit needs torchao, which is not") as caught:
        check_packages(parse_job(json.dumps(narrow)))
    assert caught.value.field == "train.optimizer"
    assert "[8bit]" in caught.value.hint or "torchao" in caught.value.hint
