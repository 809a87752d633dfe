# SPDX-License-Identifier: Apache-2.0
"""Run a function right after a module is imported, without importing the module now."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs one function as soon as one module has been imported."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            self.action()

        spec.loader.exec_module = exec_module
        return spec


def after_import(name: str, action: Callable[[], None]) -> None:
    """Run ``action`` once ``name`` is imported: now if it already is, else right after its import.

    Args:
        name: a module's full name.
        action: takes nothing; an error in it is an error of the import.
    """
    if name in sys.modules:
        action()
    elif not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, action))
