"""Hooks: users' functions that a process calls at a fixed point. The registry, and `around_enqueue`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, TypeVar

from dataloader.config import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Hook:
    """The functions for one point, in the order of their registration."""

    def __init__(self, name: str, *arguments: str, wraps: bool = False) -> None:
        """The functions are called with these `arguments`; one that `wraps` is a generator function with one yield."""
        self.name = name
        self._call = f"f({', '.join(arguments)})"
        self._count = len(arguments)
        self._wraps = wraps
        self._functions: dict[int, Callable[..., Any]] = {}

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(tuple(self._functions.values()))

    def __len__(self) -> int:
        return len(self._functions)

    def add(self, function: F) -> F:
        """Register the function, once, or in the place of one imported before; raises TypeError for a wrong one."""
        fault, is_generator = None, inspect.isgeneratorfunction(function)
        try:
            inspect.signature(function).bind(*[None] * self._count)
        except (TypeError, ValueError):
            fault = f"a function that can be called as {self._call}"
        if not fault and (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            fault = "a plain function, without async"
        elif not fault and is_generator is not self._wraps:
            with_one = f"a generator function, called as {self._call}, with one yield"
            fault = with_one if self._wraps else "a function without yield"
        if fault:
            raise TypeError(f"@{self.name}: {identity(function)} should be {fault}")
        functions: list[Callable[..., Any]] = [*self, function]
        place = next((n for n, known in enumerate(self) if _is_imported_anew(function, known)), None)
        if place is not None:
            functions[place] = functions.pop()
        self._functions = {id(each): each for each in functions}
        return function


def identity(function: Callable[..., Any]) -> str:
    """The function's module and name."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _is_imported_anew(function: Callable[..., Any], known: Callable[..., Any]) -> bool:
    """Whether `function` is surely `known` again, of a second import of their module."""
    if not (inspect.isfunction(function) and inspect.isfunction(known)) or function.__closure__ or known.__closure__:
        return False
    code, older = function.__code__, known.__code__
    if code is older:  # one import has made both: in a loop, or in a function called twice
        return False
    if code.co_name == "<lambda>" and code != older:  # a line may hold several
        return False
    return (identity(function), code.co_firstlineno) == (identity(known), older.co_firstlineno)


class WrongAnswer(TypeError):
    """A function of `around_enqueue` has returned no job. The text does not quote it; `function` names the function."""

    def __init__(self, function: str, should_be: str) -> None:
        super().__init__(f"@around_enqueue: {function} should return {should_be}")
        self.function = function


AROUND_ENQUEUE = Hook("around_enqueue", "job")


def around_enqueue(function: F) -> F:
    """Call `function(job)` for each job that this process is about to add; the process adds what it returns.

    `job` has the given, valid fields; only `lock_key` may be missing. What is returned is checked again. A ValueError
    refuses the job, and the producer gets its text. Raises TypeError unless the function can be called so.
    """
    return AROUND_ENQUEUE.add(function)


def before_enqueue(job: Mapping[str, Any]) -> dict[str, Any]:
    """The job's fields after every `around_enqueue`, which get a copy; raises their errors, and WrongAnswer."""
    changed = {**job, "args": dict(job.get("args", {}))}
    for function in AROUND_ENQUEUE:
        changed = function(changed)
        if not isinstance(changed, dict):
            kind = type(changed).__name__
            raise WrongAnswer(identity(function), f"the job's fields as a dict, not {kind}")
    return changed


def load(modules: Iterable[str]) -> None:
    """Import the modules of DL_HOOKS; raises ConfigError, which names the module and the error."""
    for name in modules:
        try:
            import_users(name)
        except Exception as e:
            from dataloader.log import masking  # not at the top: a producer imports this module and needs no logging

            raise ConfigError(masking.masked(f"DL_HOOKS: {name} cannot be imported: {type(e).__name__}: {e}")) from None


def import_users(name: str) -> None:
    """Import a users' module, also from the working folder, which comes first for it alone and last for others."""
    with suppress(OSError):  # the working folder may have been removed
        if (folder := os.getcwd()) not in sys.path:
            sys.path.append(folder)
        _FIRST.folders.setdefault(name.partition(".")[0], folder)
    if _FIRST not in sys.meta_path:
        sys.meta_path.insert(0, _FIRST)
    importlib.import_module(name)


class _First(MetaPathFinder):
    """Finds the top of a users' module in the folder that stands for its name here; packages with a file only."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if (folder := self.folders.get(fullname)) is None:
            return None
        spec = PathFinder.find_spec(fullname, [folder])
        return spec if spec and spec.loader else None  # a bare folder of this name may be no package


_FIRST = _First()
