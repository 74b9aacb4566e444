"""Module paths of before the six floors, for one release: `covmerge.recompute` is `covmerge.run.recompute`.

They were internal, and scripts import from them all the same. A warning names the new path.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_FLOORS = ("base", "maths", "files", "plan", "run", "front")
_RENAMED = {"twins": "reference"}
_ROOT = Path(__file__).parent


class Moved(MetaPathFinder, Loader):
    """Finds a module under its old path; what is imported is the module itself, once."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Return a spec for an old path; None for all others."""
        return None if new_path(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to `exec_module`."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new path in the place of the empty one."""
        new = new_path(module.__name__)
        assert new is not None
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        found = import_module(new)
        # A package that is one file today is asked for its old modules, which are the file itself.
        vars(found).setdefault("__path__", [])
        sys.modules[module.__name__] = found


def new_path(name: str) -> str | None:
    """Return where a module lies now, if `name` is its old path.

    Example:
        >>> new_path("covmerge.twins"), new_path("covmerge.run.engine"), new_path("covmerge.no")
        ('covmerge.maths.reference', None, None)
        >>> new_path("covmerge.recompute.compute")  # a package that is one file today
        'covmerge.run.recompute'
    """
    package, _, rest = name.partition(".")
    first, _, inner = rest.partition(".")
    if package != "covmerge" or not first:
        return None
    if (first in _FLOORS and first != "plan") or _is_there(name):
        return None
    tail = ".".join(filter(None, (_RENAMED.get(first, first), inner)))
    known = [f"covmerge.{floor}.{tail}" for floor in _FLOORS]
    if first == "plan":
        known = [f"covmerge.plan.planning.{inner}"]
    known += [path for path in (path.rpartition(".")[0] for path in known) if _is_file(path)]
    return next((path for path in known if _is_there(path)), None)


def _is_there(name: str) -> bool:
    return (_ROOT.joinpath(*name.split(".")[1:]) / "__init__.py").is_file() or _is_file(name)


def _is_file(name: str) -> bool:
    return _ROOT.joinpath(*name.split(".")[1:-1], f"{name.rpartition('.')[2]}.py").is_file()
