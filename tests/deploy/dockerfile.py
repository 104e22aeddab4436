"""A parser for the stages of deploy/images/Dockerfile, as much as the tests need."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from tests.deploy.files import DEPLOY

DOCKERFILE = DEPLOY / "images" / "Dockerfile"


@dataclass
class Stage:
    """One stage, with what it inherits from its parent stage."""

    parent: str
    entrypoint: list[str] = field(default_factory=list)
    user: str = "0"
    # ARGs of this stage, of its parents and of the stages in its COPY --from.
    arguments: set[str] = field(default_factory=set)
    health: list[str] = field(default_factory=list)
    installs: str = ""


def stages(text: str) -> dict[str, Stage]:
    """Return all stages by name, each after the stages it builds on."""
    stages_by_name: dict[str, Stage] = {}
    stage = Stage("")
    for line in re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.M)).splitlines():
        word, _, operand = line.partition(" ")
        match word:
            case "FROM":
                parent, name = operand.split(" AS ")
                base = stages_by_name.get(parent, Stage(""))
                stage = Stage(parent, user=base.user, arguments=set(base.arguments))
                stage.installs = base.installs
                stages_by_name[name] = stage
            case "ARG":
                stage.arguments.add(operand.partition("=")[0])
            case "USER":
                stage.user = operand
            case "ENTRYPOINT":
                stage.entrypoint = json.loads(operand)
            case "HEALTHCHECK":
                stage.health = json.loads(operand.partition("CMD ")[2])
            case "COPY":
                if copied := re.match(r"--from=(\S+)", operand):
                    stage.arguments |= stages_by_name[copied[1]].arguments
                    stage.installs += stages_by_name[copied[1]].installs
            case "RUN":
                stage.installs += operand
    return stages_by_name


STAGES = stages(DOCKERFILE.read_text())
TARGETS = {name: STAGES[name] for name in ("server", "teacher", "trainer")}
