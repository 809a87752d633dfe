# SPDX-License-Identifier: Apache-2.0
"""The import graph: modules in no circle, and no arrow from a lower room to a higher one."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import verl_ext

PACKAGE = Path(verl_ext.__file__).parent
FLOORS = (
    {"files", "masking", "after_import", "typed_settings"},
    {"allocation"},
    {"tiny", "rewards", "cpu"},
    {"configuration", "command_line", "data", "runs", "smollm2"},
    {"launch", "rollout", "simulation"},
    {"training", "reports", "lab"},
    {"checks"},
    {"testing"},
    {"main_ppo", "check", "simulate", "compare", "report", "demo", "smollm2_demo", "cli"},
)
"""From the ground up. A room imports from its own floor's rooms and from those below."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("verl_ext", *path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[1:2] != ("configs",):
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that one module imports anywhere in it, without those for type checking alone."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in _run_time(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            named = {f"{module}.{alias.name}" for alias in node.names}
            found |= (named & set(known)) or {module}
    return (found & set(known)) - {name}


def _run_time(tree: ast.AST):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _run_time(node)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@pytest.fixture(scope="module")
def graph():
    known = modules()
    return {name: imports(name, path, known) for name, path in known.items()}


def test_no_circle(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules that import each other: " + " -> ".join(error.args[1]))


def test_every_room_has_a_floor(graph):
    assert {room(name) for name in graph} - {""} <= set(FLOOR)


def test_no_arrow_up(graph):
    up = [
        f"{name} -> {other}"
        for name, others in graph.items()
        for other in others
        if room(name) and room(other) and FLOOR[room(other)] > FLOOR[room(name)]
    ]
    assert not up, "\n".join(sorted(up))


def test_rooms_in_no_circle(graph):
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        rooms.setdefault(room(name), set()).update(room(other) for other in others if room(other) != room(name))
    try:
        TopologicalSorter({name: others - {""} for name, others in rooms.items() if name}).prepare()
    except CycleError as error:
        pytest.fail("rooms that import each other: " + " -> ".join(error.args[1]))


def test_every_room_says_what_belongs_there():
    silent = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("__init__.py")
        if path.parent.name != "configs" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == [] or silent == ["__init__.py"]


@pytest.mark.parametrize("heavy", ["verl", "ray", "torch", "vllm", "transformers"])
def test_decisions_are_pure(heavy):
    for path in (PACKAGE / "allocation").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            assert heavy not in {name.split(".")[0] for name in names}, path
