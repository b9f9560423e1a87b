"""``explain module:factory``: find the function, call it, and explain what it returns."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fxgrad.errors import FxgradError, nearest
from fxgrad.explanation.explaining import Explanation, explain

FORM = "(model, args) or (model, args, kwargs)"


class WrongInput(Exception):
    """The input of a command is wrong; the text says how."""


def explain_result_of(name: str, out: Path) -> Explanation:
    """Explain the model that ``module:factory`` returns, and write the page.

    `WrongInput` says what is wrong with the names, the factory or the place of the page. An error of fxgrad passes.
    """
    if not out.parent.is_dir():
        raise WrongInput(f"--out: no folder {out.parent}")
    model, args, kwargs = _checked(name, _run(name, "calling", _find(name)))
    explanation: Explanation = _run(name, "explaining the model of", lambda: explain(model, *args, **kwargs))
    try:
        explanation.to_html(out)
    except OSError as error:
        raise WrongInput(f"--out: {error.strerror}: {out}") from error
    return explanation


def _find(name: str) -> Callable[[], Any]:
    """Return the factory."""
    module_name, colon, factory = name.partition(":")
    if module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("/", ".").strip(".")
        raise WrongInput(f"'{module_name}' is a file; name its module: {dotted}:{factory or 'factory'}")
    if not (module_name and colon and factory):
        raise WrongInput(f"'{name}' is not of the form module:factory, such as train:example")
    module = _run(name, "importing the module of", lambda: _import(module_name))
    found = getattr(module, factory, None)
    if found is None:
        functions = [one for one, value in vars(module).items() if callable(value)]
        raise WrongInput(f"module '{module_name}' has no '{factory}'. {nearest(factory, functions)}".rstrip())
    if not callable(found) or isinstance(found, nn.Module):
        raise WrongInput(f"{name} is of type {type(found).__name__}; it has to be a function that returns {FORM}")
    return found  # type: ignore[no-any-return]


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # something that the module imports
            raise
        raise WrongInput(f"no module '{error.name}' in {os.getcwd()} or on the path of Python") from error


def _run(name: str, doing: str, run: Callable[[], Any]) -> Any:
    """Call a piece of the user's code, and turn its error into a sentence."""
    try:
        return run()
    except (WrongInput, FxgradError):
        raise
    except (Exception, SystemExit) as error:
        said = " ".join([f"{type(error).__name__}:", *str(error).split(), *_last_place_of_the_user(error)])
        raise WrongInput(f"{doing} {name} raised {said}") from error


def _last_place_of_the_user(error: BaseException) -> list[str]:
    """Return the last line of the traceback in the user's own files, with the file's name."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = (f"{os.sep}site-packages{os.sep}", str(Path(__file__).parents[1]), os.path.dirname(os.__file__), "<")
    own = [frame for frame in frames if not any(part in frame.filename for part in foreign)]
    return [f"({frame.filename}:{frame.lineno})" for frame in own[-1:]]


def _checked(name: str, returned: Any) -> tuple[nn.Module, Sequence[Any], dict[str, Any]]:
    """Return model, args and kwargs, if the factory returned these."""
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        length = f" of {len(returned)}" if isinstance(returned, tuple) else ""
        raise WrongInput(f"{name} has to return {FORM}, not a {type(returned).__name__}{length}")
    model, args, kwargs = returned if len(returned) == 3 else (*returned, {})
    if not isinstance(model, nn.Module):
        raise WrongInput(f"{name} has to return {FORM}; its model is of type {type(model).__name__}")
    if not isinstance(args, tuple | list):
        raise WrongInput(f"{name} has to return {FORM}; its args are of type {type(args).__name__}, not a tuple (x,)")
    if not isinstance(kwargs, dict):
        raise WrongInput(f"{name} has to return {FORM}; its kwargs are of type {type(kwargs).__name__}, not a dict")
    return model, args, kwargs
