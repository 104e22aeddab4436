"""Sizes, names and kinds in the source, as a report: places to look at, not failures.

    python -m tests.architecture.report [--most 12]

prints the largest files, the longest functions, the longest parameter lists, the fullest folders,
the number of short files, the share of assigned names that say nothing, class names that stand in
two packages, the places where kinds of jobs are told apart by `isinstance`, and what a reader opens
from `distill run` to the loss and for one on-policy step: the whole files that define the steps of
READING_PATHS.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.architecture.sources import PRODUCT, ROOT, functions, relative_name
from tests.architecture.structure import folders_of

FILE_LINES = 400
SHORT_FILE_LINES = 60
FUNCTION_LINES = 60
PARAMETERS = 7
MODULES = 14
# Participles, pronouns and adverbs that do not say what a value is.
EMPTY_NAMES = {
    *("found", "one", "made", "told", "asked", "most", "ours", "theirs", "given", "taken", "kept"),
    *("said", "seen", "done", "left", "gone", "whole", "rest", "mine", "wanted"),
}
# What a reader follows, by definition: a function or class whose name is unique in the product, or
# PACKAGE.NAME. The order is that of the program.
READING_PATHS = {
    "from `distill run` to the loss": (
        *("run_new", "load_job", "parse_job", "OnPolicyJob", "TrainingJob", "check_files"),
        *("check_data", "RunDirectory", "run_attempt", "trainer_command", "run_to_verdict"),
        *("_run_attempt", "connect", "check_teachers", "assemble", "load_prompts"),
        *("PromptFormat", "student_trainer.load_model", "distribute", "make_optimizer"),
        *("OnPolicySteps", "Method", "Trainer", "Learner", "Step", "ScoredRollouts"),
        *("HuggingFaceRollouts", "Sampler", "sample_step", "RemoteTeacher", "ScoreQuery"),
        *("TeacherClient", "PendingRows", "micro_batches", "make_batch", "Student"),
        *("fused_linear_loss", "make_chunk", "DistillationObjective", "topk_kl"),
    ),
    "one on-policy step": (
        *("Trainer", "Step", "learning_rate", "OnPolicySteps", "PromptSet", "ScoredRollouts"),
        "Learner",
        *("HuggingFaceRollouts", "Sampler", "sample_step", "draw_tail", "Rollout"),
        *("RemoteTeacher", "ScoreQuery", "TeacherClient", "PendingRows", "micro_batches"),
        *("make_batch", "TokenSequence", "Replicated", "Student", "fused_linear_loss"),
        *("make_chunk", "logit_chunks", "DistillationObjective", "topk_kl"),
    ),
}
JOB_KINDS = frozenset({"OnPolicyJob", "OfflineJob", "RLJob", "SFTJob", "EvalJob", "CaptureJob"})


def empty_names(paths: Iterable[Path]) -> tuple[Counter[str], int]:
    """Count assignments to each name in EMPTY_NAMES, and all assignments to names."""
    counts: Counter[str] = Counter()
    total = 0
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                total += 1
                if node.id.strip("_") in EMPTY_NAMES:
                    counts[node.id] += 1
    return counts, total


def classes_in_two_packages(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return the top-level public class names that several packages define."""
    packages: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                packages[node.name].add(path.relative_to(ROOT).parts[0])
    return {name: places for name, places in packages.items() if len(places) > 1}


def kind_checks(paths: Iterable[Path]) -> list[str]:
    """Return the lines that distinguish kinds of jobs: `isinstance`, and class patterns."""
    lines = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                    names = {
                        name_node.id
                        for name_node in ast.walk(kinds)
                        if isinstance(name_node, ast.Name)
                    }
                case ast.MatchClass(cls=ast.Name(id=name)):
                    names = {name}
                case _:
                    continue
            if names & JOB_KINDS:
                lines.add(f"{relative_name(path)}:{getattr(node, 'lineno', 0)}")
    return sorted(lines)


def files_defining(names: Iterable[str], paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the files that define each name at top level; `PACKAGE.NAME`: those of a package."""
    definitions: defaultdict[str, list[Path]] = defaultdict(list)
    for path in paths:
        package = path.relative_to(ROOT).parts[0]
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                definitions[node.name].append(path)
                definitions[f"{package}.{node.name}"].append(path)
    return {name: definitions[name] for name in names}


def _print_largest(title: str, sizes: list[tuple[int, str]], limit: int, max_rows: int) -> None:
    larger_sizes = sorted((size for size in sizes if size[0] > limit), reverse=True)
    print(f"\n{title} over {limit}: {len(larger_sizes)}")
    for size, name in larger_sizes[:max_rows]:
        print(f"  {size:>5}  {name}")


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=12, help="rows of each table")
    max_rows = parser.parse_args().most
    lines = [(len(path.read_text().splitlines()), relative_name(path)) for path in PRODUCT]
    lengths, parameters = [], []
    for path in PRODUCT:
        for node in functions(ast.parse(path.read_text())):
            place = f"{relative_name(path)}:{node.lineno} {node.name}"
            lengths.append(((node.end_lineno or node.lineno) - node.lineno + 1, place))
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters.append(
                (
                    len(
                        [argument for argument in arguments if argument.arg not in ("self", "cls")]
                    ),
                    place,
                )
            )
    short_files = len([count for count, _ in lines if count < SHORT_FILE_LINES])
    print(
        f"{len(lines)} files, {sum(count for count, _ in lines):,} lines;"
        f" {short_files} files under {SHORT_FILE_LINES} lines"
    )
    for title, definitions in READING_PATHS.items():
        opened = {path for paths in files_defining(definitions, PRODUCT).values() for path in paths}
        line_count = sum(len(path.read_text().splitlines()) for path in opened)
        print(f"{title}: {len(opened)} files, {line_count:,} lines")
    _print_largest("files, lines", lines, FILE_LINES, max_rows)
    _print_largest("functions, lines", lengths, FUNCTION_LINES, max_rows)
    _print_largest("functions, parameters", parameters, PARAMETERS, max_rows)
    folders = [(folder.modules, folder.name) for folder in folders_of(ROOT)]
    _print_largest("folders, modules", folders, MODULES, max_rows)
    names, total = empty_names(PRODUCT)
    share = 100 * names.total() / total
    print(f"\nassigned names that say nothing: {names.total()} of {total} ({share:.2f}%)")
    print("  " + ", ".join(f"{name} {count}" for name, count in names.most_common(max_rows)))
    duplicate_classes = classes_in_two_packages(PRODUCT)
    print(f"\nclass names in two packages: {len(duplicate_classes)}")
    for name, packages in sorted(duplicate_classes.items()):
        print(f"  {name}: {', '.join(sorted(packages))}")
    checks = kind_checks(PRODUCT)
    files = len({line.partition(":")[0] for line in checks})
    print(f"\nlines that tell kinds of jobs apart: {len(checks)} in {files} files")


if __name__ == "__main__":
    main()
