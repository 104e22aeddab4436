"""The structure of the five packages: modules per folder, imports between rooms, circles.

    python -m tests.architecture.structure [CHECKOUT]

prints one line per folder that has more than one module. A room is a module or a folder directly
inside a folder. An arrow is an ordered pair of rooms of one folder where a module of the first
imports one of the second; a circle is a set of rooms that import each other, directly or through
others. Upward arrows are those against the order of `.importlinter`.
"""

from __future__ import annotations

import ast
import configparser
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.sources import PACKAGES

Arrow = tuple[str, str]


@dataclass(frozen=True)
class Folder:
    """One folder: its dotted name, its modules at one level, its rooms, and their imports."""

    name: str
    modules: int
    rooms: frozenset[str]
    arrows: frozenset[Arrow]
    upward: frozenset[Arrow]

    @property
    def circles(self) -> list[set[str]]:
        """Sets of rooms that import each other."""
        reachable = {room: self._reachable_from(room) for room in self.rooms}
        circle_of_room = [
            {other for other in self.rooms if other in reachable[room] and room in reachable[other]}
            for room in sorted(self.rooms)
        ]
        return [
            circle
            for n, circle in enumerate(circle_of_room)
            if circle and circle not in circle_of_room[:n]
        ]

    def _reachable_from(self, room: str) -> set[str]:
        reachable: set[str] = set()
        pending = [room]
        while pending:
            current = pending.pop()
            new = {b for a, b in self.arrows if a == current} - reachable
            reachable |= new
            pending += new
        return reachable


def modules_of(root: Path) -> dict[str, Path]:
    """Return every module of the packages by its dotted name, without generated code."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            if "_pb2" not in path.name:
                modules[name.removesuffix(".__init__")] = path
    return modules


def imports_of(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Return the modules that `path` imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name in modules)
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    full = f"{module}.{alias.name}"
                    if full in modules or module in modules:
                        yield full if full in modules else module


def ranks_of(root: Path) -> dict[str, int]:
    """Return the layer of each module or folder that `.importlinter` orders; 0 is the highest."""
    config = configparser.ConfigParser()
    config.read(root / ".importlinter")
    ranks = {}
    for name in config.sections():
        section = config[name]
        if section.get("type") != "layers" or "containers" not in section:
            continue
        for rank, layer in enumerate(section["layers"].split("\n")[1:]):
            for room in layer.split("|"):
                ranks[f"{section['containers'].strip()}.{room.strip()}"] = rank
    return ranks


def folders_of(root: Path) -> list[Folder]:
    """Return every folder of the packages that has rooms."""
    modules = modules_of(root)
    pairs = {(a, b) for a, path in modules.items() for b in imports_of(path, modules) if a != b}
    ranks = ranks_of(root)
    names = {name.rpartition(".")[0] for name in modules} - {""}
    folders = []
    for name in sorted(names):
        start = name + "."
        modules_inside = [module for module in modules if module.startswith(start)]
        direct_modules = [
            module
            for module in modules_inside
            if "." not in module[len(start) :] and modules[module].name[0] != "_"
        ]
        arrows = set()
        for importer, imported in pairs:
            if importer.startswith(start) and imported.startswith(start):
                rooms = (importer[len(start) :].split(".")[0], imported[len(start) :].split(".")[0])
                if rooms[0] != rooms[1]:
                    arrows.add(rooms)
        upward = {
            (a, b)
            for a, b in arrows
            if start + a in ranks and start + b in ranks and ranks[start + a] > ranks[start + b]
        }
        rooms_here = frozenset(module[len(start) :].split(".")[0] for module in modules_inside)
        count = len([module for module in direct_modules if modules[module].name != "__init__.py"])
        folders.append(Folder(name, count, rooms_here, frozenset(arrows), frozenset(upward)))
    return folders


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    print(f"{'folder':<34}{'modules':>8}{'rooms':>7}{'arrows':>8}{'upward':>8}{'circles':>9}")
    for folder in folders_of(root):
        if len(folder.rooms) > 1:
            print(
                f"{folder.name:<34}{folder.modules:>8}{len(folder.rooms):>7}"
                f"{len(folder.arrows):>8}{len(folder.upward):>8}{len(folder.circles):>9}"
            )


if __name__ == "__main__":
    main()
