"""The table `sweep` of a job: every combination is a separate job, or the file is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from clients.cli.app import main
from clients.config.file import load_job, load_jobs
from protos.errors import InvalidInput

HEAD = """\
name = "student"
method.type = "on_policy"
student.model = "tiny"
teacher.address = "localhost:1"
data.path = "x.jsonl"
labels.team = "math"
"""
LISTS = """\
[sweep]
"train.learning_rate" = [1e-5, 3e-5]
train.prompts_per_step = [8, 16, 32]
student.lora = [{ rank = 4 }, { rank = 8 }]
"""
PIPELINE = """\
[[job]]
name = "student"
method.type = "sft"
student.model = "tiny"
data.path = "x.jsonl"
[job.sweep]
seed = [1, 2]

[[job]]
name = "score"
method.type = "eval"
student.model = "@student/export"
data.path = "x.jsonl"
reward.type = "exact_match"
"""


def write_jobs(tmp_path: Path, text: str, name: str = "jobs.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_the_product_of_the_lists(tmp_path: Path) -> None:
    files = load_jobs(write_jobs(tmp_path, HEAD + LISTS))
    base_config = load_job(write_jobs(tmp_path, HEAD, "plain.toml")).config.model_dump()
    expected_configs = []
    for rate, prompts, rank in product(("1e-05", "3e-05"), (8, 16, 32), (4, 8)):
        lora = f'{{"rank": {rank}}}'
        config = {
            **base_config,
            "train": dict(base_config["train"]),
            "student": dict(base_config["student"]),
        }
        config["name"] = f"student-learning_rate={rate}-prompts_per_step={prompts}-lora={lora}"
        config["train"] |= {"learning_rate": float(rate), "prompts_per_step": prompts}
        config["student"]["lora"] = {"rank": rank, "alpha": None, "train_head": False}
        config["labels"] = {
            "team": "math",
            "sweep": "student",
            "train.learning_rate": rate,
            "train.prompts_per_step": str(prompts),
            "student.lora": lora,
        }
        expected_configs.append(config)
    assert [file.config.model_dump() for file in files] == expected_configs
    sources = files[0].sources
    line_numbers = [
        sources[key].rpartition(":")[2] for key in ("train.learning_rate", "student.model")
    ]
    assert line_numbers == ["8", "3"]


def test_yaml_and_set_are_the_same_jobs(tmp_path: Path) -> None:
    lists = '[sweep]\n"train.learning_rate" = [1e-5, 3e-5]\n'
    toml = load_jobs(write_jobs(tmp_path, HEAD + lists))
    yaml = """\
name: student
student: {model: tiny}
teacher: {address: "localhost:1"}
data: {path: x.jsonl}
labels: {team: math}
sweep:
  train.learning_rate: [1e-5, 3e-5]
"""
    of_yaml = load_jobs(write_jobs(tmp_path, yaml, "jobs.yaml"))
    assert [file.config for file in of_yaml] == [file.config for file in toml]
    assert of_yaml[1].sources["train.learning_rate"].endswith("jobs.yaml:7")
    base_file = write_jobs(tmp_path, HEAD, "plain.toml")
    of_set = load_jobs(base_file, ["sweep.train.learning_rate=[1e-5, 3e-5]", "seed=3"])
    assert [file.config.model_copy(update={"seed": 0}) for file in of_set] == [
        file.config for file in toml
    ]
    assert of_set[0].sources["train.learning_rate"] == of_set[0].sources["seed"] == "--set"


def test_names_of_points(tmp_path: Path) -> None:
    """Keys with the same last part appear with full names; a long value appears as its index."""
    head = HEAD.replace('"student"', '"s"')
    lists = f"""[sweep]
student.model = ["a/b", "c"]
teacher.model = ["d"]
data.system = ["Be brief.", "{"x" * 61}"]
"""
    head = head.replace('teacher.address = "localhost:1"\n', "")
    names = [file.config.name for file in load_jobs(write_jobs(tmp_path, head + lists))]
    assert names == [
        "s-student.model=a/b-teacher.model=d-system=Be brief.",
        "s-student.model=a/b-teacher.model=d-system=#2",
        "s-student.model=c-teacher.model=d-system=Be brief.",
        "s-student.model=c-teacher.model=d-system=#2",
    ]


@pytest.mark.parametrize(
    ("sweep", "problem"),
    [
        ("sweep = 3", ":7: sweep: must be a table of keys with lists of values, such as"),
        ("[sweep]", ":7: sweep: must be a table of keys with lists of values, such as"),
        ("[sweep]\nseed = 3", ":8: sweep.seed: must be a list of values (got 3)"),
        ("[sweep]\nseed = []", ":8: sweep.seed: must be a list of values (got [])"),
        ("[sweep]\nseed = [1, 2, 1]", ":8: sweep.seed: has the value 1 twice; remove one"),
        (
            '[sweep]\n"train.warmup_steps" = [1]\ntrain.warmup_steps = [2]',
            ":8: sweep.train.warmup_steps: is given twice",
        ),
        (
            '[sweep]\ntrain = [{ learning_rate = 1e-4 }]\n"train.warmup_steps" = [1, 2]',
            ":9: sweep.train.warmup_steps: train has a list too",
        ),
        (
            '[sweep]\n"train.warmup_steps" = [1, 2]\ntrain = [{ learning_rate = 1e-4 }]',
            ":9: sweep.train: train has a list too",
        ),
        ("[sweep]\nseed = [1, 1.0]", ":8: sweep.seed: has the value 1.0 twice; remove one"),
        ('[sweep]\nname = ["a", "b"]', ":8: sweep.name: the sweep sets the names"),
        ('[sweep]\n"labels.lab" = ["a", "b"]', ":8: sweep.labels.lab: the sweep sets the names"),
        ("[sweep]\nname.x = [1]", ":8: sweep.name.x: 'name' is not a table"),
        ('[sweep]\nlabels.team = ["a"]', ":7: sweep: the sweep sets the label"),
        (
            f"[sweep]\nseed = {[*range(11)]}\nmax_steps = {[*range(1, 11)]}",
            ":7: sweep: has 110 combinations; a sweep has at most 100",
        ),
        ("[sweep]\nsede = [1, 2]", ":8: sede: unknown key; did you mean 'seed'?"),
        ('[sweep.student]\nseed = 1\n"lora.rang" = [2]', ":8: sweep.student.seed: must be a list"),
        ('[sweep.student]\nlora."rank.x" = [1]', ":8: student.lora.rank"),
        ('[sweep]\nstudent."lora.rank" = [0]', ":8: student.lora.rank: must be greater"),
        ("[train]\nseed = 1\n[sweep.train]\nlearning_rate.x = [1]", ":10: train.learning_rate"),
        ("[sweep]\nmax_steps = [5, 0]", ":8: max_steps: must be greater than or equal to 1"),
        ('[sweep]\nsweep.seed = ["a"]', ":7: sweep: unknown key"),
    ],
)
def test_refused_with_line_and_key(tmp_path: Path, sweep: str, problem: str) -> None:
    if "the sweep sets the label" in problem:
        sweep = sweep.replace("labels.team", "seed").replace('"a"', "1")
        sweep += '\n[labels]\nseed = "own"'
    head = HEAD.replace('labels.team = "math"\n', "\n") if "[labels]" in sweep else HEAD
    with pytest.raises(InvalidInput) as caught:
        load_jobs(write_jobs(tmp_path, head + sweep))
    assert problem in str(caught.value)


def test_every_problem_of_every_point_once(tmp_path: Path) -> None:
    path = write_jobs(tmp_path, HEAD + "epoch = 3\n[sweep]\nmax_steps = [0, -1]\nseed = [1, 2]\n")
    with pytest.raises(InvalidInput) as caught:
        load_jobs(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4, "one line for each bad value, one for the unknown key"
    assert lines[0].endswith("3 problems")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("", ""),
            ":12: student.model: 'student' is a sweep of 2 jobs; give the name of one job, such as"
            " '@student-seed=1/export'",
        ),
        (
            ("@student/export", 'x"\nafter = "student'),
            ":13: after: 'student' is a sweep of 2 jobs; give the name of one job, such as"
            " 'student-seed=1'",
        ),
        (('"score"', '"student"'), ":10: name: another job of the file is 'student'"),
    ],
)
def test_a_sweep_is_no_job(tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_jobs(write_jobs(tmp_path, PIPELINE.replace(*change)))
    assert problem in str(caught.value)


def test_one_of_its_jobs_is_named(tmp_path: Path) -> None:
    text = PIPELINE.replace("@student/", "@student-seed=2/")
    assert [file.config.name for file in load_jobs(write_jobs(tmp_path, text))] == [
        "student-seed=1",
        "student-seed=2",
        "score",
    ]


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "jobs.md").read_text()
    block = page.partition("## Sweeps")[2].partition("```toml\n")[2].partition("```")[0]
    assert len(load_jobs(write_jobs(tmp_path, block))) == 4


def test_commands_that_take_one_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_jobs(tmp_path, HEAD + "[sweep]\nseed = [1, 2]\n")
    assert main(["run", str(path)]) == 2
    message = "has 2 jobs, but this command takes one job; use distill submit"
    assert message in capsys.readouterr().err
    with pytest.raises(InvalidInput, match=r"sweep\.seed: --set gives this key one value"):
        load_jobs(path, ["seed=3"])
