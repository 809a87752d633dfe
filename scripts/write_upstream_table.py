# SPDX-License-Identifier: Apache-2.0
"""`python -m scripts.write_upstream_table`: writes docs/upstream.md, the table of everything of verl, vLLM, Ray and
TransferQueue that is overridden, registered or replaced, from the code itself. Run it in the repository.

- Overridden: methods of our classes that a base class of theirs has too; the reason is the first paragraph of the
  method's docstring, else the first comment in it, else the first paragraph of the class's docstring.
- Registered: our classes under a decorator of theirs, and the entry points of pyproject.toml.
- Replaced: what a function's docstring names in a line ``Replaces: full.name.of.it (package version)``.
- Guarded by: the contract tests that name it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_ext.checks.versions import REQUIRED, REQUIRED_ON_CPU

PACKAGES = ("verl", "vllm", "ray", "transfer_queue")
DOCUMENT = Path("docs", "upstream.md")
_REPLACES = re.compile(r"^Replaces: ([\w.]+) \((\w[\w-]* [\w.]+)\)$", re.M)
_NOT_OURS_TO_OVERRIDE = ("__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__annotations__")


@dataclass(frozen=True, order=True)
class Row:
    """One thing of theirs."""

    theirs: str
    """Full name."""
    ours: str
    """Full name, without the package."""
    why: str
    """From the docstring or comment."""
    version: str
    """Package and version it was written for."""
    guards: tuple[str, ...]
    """Contract tests that name it."""


def is_theirs(module: str | None) -> bool:
    """Whether a module belongs to one of the packages."""
    return bool(module) and module.split(".")[0] in PACKAGES


# ------------------------------------------------ contract tests


@dataclass(frozen=True)
class ContractTest:
    """What a contract test names."""

    name: str
    """file::function."""
    attributes: frozenset[tuple[str, str]]
    """(class, attribute) pairs, the class by the name it was imported under or is an alias of."""
    text: str
    """Its source, with the constants it uses."""


def contract_tests(root: Path) -> list[ContractTest]:
    """All of tests/contract."""
    found = []
    for path in sorted((root / "tests" / "contract").glob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        aliases, constants = _aliases(tree), _constants(tree, source)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                used = [constants[n.id] for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in constants]
                nodes = [node, *(constant for constant, _ in used)]
                pairs = {
                    (owner, part.attr)
                    for top in nodes
                    for part in ast.walk(top)
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
                    for owner in aliases.get(part.value.id, {part.value.id})
                }
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                text = "\n".join(source.splitlines()[first - 1 : node.end_lineno]) + "".join(t for _, t in used)
                found.append(ContractTest(f"{path.stem}::{node.name}", frozenset(pairs), text))
    return found


def _constants(tree: ast.Module, source: str) -> dict[str, tuple[ast.AST, str]]:
    return {
        target.id: (node, ast.get_source_segment(source, node) or "")
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _aliases(tree: ast.Module) -> dict[str, set[str]]:
    """Names of a module that stand for a class, and the identifiers they are made of (`Trainer = base.PPOTrainer`)."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                found[name.asname or name.name] = {name.name}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names = {n.attr for n in ast.walk(node.value) if isinstance(n, ast.Attribute)}
            names |= {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
            found[node.targets[0].id] = names
    return found


# ------------------------------------------------ our code


def source_files(root: Path) -> list[Path]:
    """This package's modules."""
    return sorted((root / "verl_ext").rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    """`verl_ext.training.trainer` of its file."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def overridden(root: Path, tests: list[ContractTest]) -> list[Row]:
    """Methods of ours that a class of theirs has too."""
    rows = set()
    for path in source_files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
        if not any(map(is_theirs, imports)):
            continue
        module = importlib.import_module(module_name(root, path))
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                rows |= set(_overrides(cls, tests))
    return sorted(rows)


def _overrides(cls: type, tests: list[ContractTest]) -> Iterator[Row]:
    theirs = [base for base in cls.__mro__ if is_theirs(base.__module__)]
    interface = next((base for base in theirs if inspect.isabstract(base)), None)
    if interface is not None and interface.__abstractmethods__ <= set(vars(cls)):
        # Implemented whole: one row for all of its methods.
        yield Row(
            theirs=f"{interface.__module__}.{interface.__name__}",
            ours=f"{cls.__module__.removeprefix('verl_ext.')}.{cls.__name__}",
            why=_line(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]),
            version=_version(interface.__module__),
            guards=tuple(t.name for t in tests if re.search(rf"\b{interface.__name__}\b", t.text)),
        )
        return
    for ours in (base for base in cls.__mro__ if base.__module__.startswith("verl_ext.")):
        for name, member in vars(ours).items():
            owner = next((base for base in theirs if name in vars(base)), None)
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if owner is None or name in _NOT_OURS_TO_OVERRIDE or not inspect.isfunction(function):
                continue
            guards = tuple(t.name for t in tests if {(base.__name__, name) for base in theirs} & t.attributes)
            yield Row(
                theirs=f"{owner.__module__}.{owner.__name__}.{name}",
                ours=f"{ours.__module__.removeprefix('verl_ext.')}.{ours.__name__}",
                why=_why(function) or _line(inspect.cleandoc(ours.__doc__ or "").split("\n\n")[0]),
                version=_version(owner.__module__),
                guards=guards,
            )


def _version(module: str) -> str:
    package = module.split(".")[0]
    return f"{package} {REQUIRED[package]}" if package in REQUIRED else package


def _why(function: object) -> str:
    """First paragraph of the docstring, or the first comment of the body."""
    function = inspect.unwrap(function)
    if documentation := inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]:
        return _line(documentation)
    comment: list[str] = []
    for line in inspect.getsource(function).splitlines()[1:]:
        text = line.strip()
        if text.startswith("# "):
            comment.append(text[2:])
        elif comment:
            break
    return _line("\n".join(comment))


def _line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def replaced(root: Path, tests: list[ContractTest]) -> list[Row]:
    """What docstrings say is replaced."""
    rows = []
    for path, node in _definitions(root):
        documentation = ast.get_docstring(node) or ""
        for theirs, version in _REPLACES.findall(documentation):
            last = re.compile(rf"\b{theirs.rpartition('.')[2]}\b")
            tail = re.compile(r"\b" + r"\.".join(theirs.split(".")[-2:]) + r"\b")
            named = [t.name for t in tests if last.search(t.text) or tail.search(t.text)]
            why = _line(documentation.split("\n\n")[0])
            name = f"{module_name(root, path).removeprefix('verl_ext.')}.{node.name}"
            rows.append(Row(theirs, name, why, version, tuple(named)))
    return sorted(rows)


def _definitions(root: Path) -> Iterator[tuple[Path, ast.FunctionDef | ast.ClassDef]]:
    for path in source_files(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield path, node


def assignments(root: Path) -> list[tuple[str, bool]]:
    """Functions that assign to a name in a module of theirs, or to `sys.modules`; whether their docstring says so."""
    found = []
    for path, node in _outermost_functions(root):
        modules = {
            alias.asname or alias.name.split(".")[0]
            for part in ast.walk(node)
            if isinstance(part, ast.Import | ast.ImportFrom)
            for alias in part.names
            if is_theirs(part.module if isinstance(part, ast.ImportFrom) else alias.name)
        }
        if any(_assigns(part, modules) for part in ast.walk(node)):
            name = f"{module_name(root, path)}.{node.name}"
            found.append((name, bool(_REPLACES.search(ast.get_docstring(node) or ""))))
    return found


def _outermost_functions(root: Path) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in source_files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for holder in (tree, *classes):
            for node in holder.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield path, node


def _assigns(node: ast.AST, modules: set[str]) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    if any(isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id in modules for t in targets):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.modules.setdefault"


def registered(root: Path) -> list[tuple[str, str, str]]:
    """(ours, where, as what), a line each."""
    rows = []
    for path in source_files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        theirs = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and is_theirs(node.module)
            for alias in node.names
        }
        for node in ast.walk(tree):
            for decorator in getattr(node, "decorator_list", ()):
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                name = ast.unparse(call)
                if name.split(".")[0] in theirs:
                    where = theirs[name.split(".")[0]] + name[len(name.split(".")[0]) :]
                    ours = f"{module_name(root, path).removeprefix('verl_ext.')}.{node.name}"
                    rows.append((ours, where, ", ".join(map(ast.unparse, getattr(decorator, "args", []))) or "-"))
    group = None
    for line in (root / "pyproject.toml").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            found = re.match(r'\[project\.entry-points\."?([\w.]+)"?\]', line)
            group = found[1] if found else None
        elif group and not group.startswith("verl_ext") and "=" in line:
            name, _, value = (part.strip().strip('"') for part in line.partition("="))
            rows.append((value.removeprefix("verl_ext."), f"entry point group {group}", name))
    return sorted(rows)


# ------------------------------------------------ the document


def document(root: Path) -> str:
    """docs/upstream.md as it should be."""
    tests = contract_tests(root)
    versions = ", ".join(f"{package} {version}" for package, version in {**REQUIRED, **REQUIRED_ON_CPU}.items())
    lines = [
        "# What of verl, vLLM and Ray is overridden, registered or replaced",
        "",
        "Written by `python -m scripts.write_upstream_table` from the code; not to be edited by hand. Every row is for",
        f"the versions that `verl_ext` asks for ({versions}). The contract tests",
        "named (`make test-contract`) fail when an upgrade changes what the row stands on. Ours are below `verl_ext`.",
        "",
        "## Replaced",
        "",
        "Nothing of these packages is edited. These functions put something in the place of theirs while a run lasts.",
        "",
        *_table(("theirs", "ours", "why", "for", "guarded by"), map(_cells, replaced(root, tests))),
        "",
        "## Overridden in a subclass",
        "",
        *_table(("theirs", "ours", "why", "for", "guarded by"), map(_cells, overridden(root, tests))),
        "",
        "## Registered",
        "",
        *_table(("ours", "where", "as"), ((f"`{ours}`", where, f"`{name}`") for ours, where, name in registered(root))),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    guards = ", ".join(f"`{guard}`" for guard in row.guards)
    return f"`{row.theirs}`", f"`{row.ours}`", row.why, row.version, guards


def _table(head: tuple[str, ...], rows) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def main(argv: list[str] | None = None) -> int:
    """Command line: writes the document, or says with --check whether it is as it should be."""
    parser = argparse.ArgumentParser("python -m scripts.write_upstream_table", description="Writes docs/upstream.md.")
    parser.add_argument("--root", type=Path, default=Path("."), help="the repository (default: this folder)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the document is stale")
    args = parser.parse_args(argv)
    if not (args.root / "tests" / "contract").is_dir():
        parser.error(f"--root={args.root}: no tests/contract in it; accepted: the repository's folder")
    text, path = document(args.root.resolve()), args.root / DOCUMENT
    if args.check:
        fresh = path.is_file() and path.read_text(encoding="utf-8") == text
        print(f"{path} is {'as it should be' if fresh else 'stale: run python -m scripts.write_upstream_table'}")
        return 0 if fresh else 1
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
