"""The stages of deploy/images/Dockerfile, read as far as the tests need."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from tests.deploy.files import DEPLOY

DOCKERFILE = DEPLOY / "images" / "Dockerfile"


@dataclass
class Stage:
    """One stage, and what it has from the stage that it starts from."""

    parent: str
    entrypoint: list[str] = field(default_factory=list)
    user: str = "0"
    # ARGs of this stage, of its parents and of the stages that it copies from.
    arguments: set[str] = field(default_factory=set)
    health: list[str] = field(default_factory=list)
    installs: str = ""


def stages(text: str) -> dict[str, Stage]:
    """All stages by name, each after those that it is made of."""
    found: dict[str, Stage] = {}
    here = Stage("")
    for line in re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.M)).splitlines():
        word, _, rest = line.partition(" ")
        match word:
            case "FROM":
                parent, name = rest.split(" AS ")
                base = found.get(parent, Stage(""))
                here = Stage(parent, user=base.user, arguments=set(base.arguments))
                here.installs = base.installs
                found[name] = here
            case "ARG":
                here.arguments.add(rest.partition("=")[0])
            case "USER":
                here.user = rest
            case "ENTRYPOINT":
                here.entrypoint = json.loads(rest)
            case "HEALTHCHECK":
                here.health = json.loads(rest.partition("CMD ")[2])
            case "COPY":
                if copied := re.match(r"--from=(\S+)", rest):
                    here.arguments |= found[copied[1]].arguments
                    here.installs += found[copied[1]].installs
            case "RUN":
                here.installs += rest
    return found


STAGES = stages(DOCKERFILE.read_text())
TARGETS = {name: STAGES[name] for name in ("server", "teacher", "trainer")}
