"""The search benchmark, tiny: data, warm start, a real job with an environment, examination."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.search import benchmark as search
from benchmarks.search.material import make_tokenizer


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_the_quick_benchmark(tmp_path: Path) -> None:
    out, work = tmp_path / "search.json", tmp_path / "work"
    threads = torch.get_num_threads()
    try:
        search.main(["--quick", "--work", str(work), "--out", str(out), "--docs", str(tmp_path)])
    finally:
        torch.set_num_threads(threads)

    def read_records(name: str) -> list[dict[str, str]]:
        lines = (work / "material" / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    result = json.loads(out.read_text())
    assert len(result["examined"]) == 4
    assert len(result["rewards"]) == 2
    assert list(result["curve"]) == ["0", "2"]
    everybody = [record["contents"] for record in read_records("corpus")]
    rooms = dict(contents.split("\n") for contents in everybody)
    assert len(rooms) == search.QUICK.people + search.QUICK.held_out
    people = {
        part: {record["prompt"].split(" or ")[0] for record in read_records(part)}
        for part in ("train", "heldout")
    }
    assert people["train"] | people["heldout"] == set(rooms)
    assert not people["train"] & people["heldout"]
    met = {
        name
        for turn in read_records("turns")
        for name in turn["prompt"].split("?")[0].split(" or ")
    }
    assert met <= people["train"]


def test_a_talk_is_the_same_in_tokens_and_in_text() -> None:
    words = make_tokenizer()
    talk = "Ada Cox or Leo Ito?<search>Ada Cox</search>\n\n<information>Doc 1(Title: Ada Cox) 07"
    ids = words(talk)["input_ids"]
    assert words.decode(ids) == talk
    assert words.unk_token_id not in ids
    assert words.eos_token_id not in ids
