"""Collects what the code takes from CuPy: names behind `xp` or `cupy`, and arguments of calls.

Used only by test_cupy_names.py. A path is a tuple: `self.xp.cuda.Device()` is ("cuda", "Device").
Names that the code gives to parts of CuPy are followed inside a function (`cuda = self.xp.cuda`)
and, for attributes of self, inside a file. An attribute of a call's result counts as one of its
class.
"""

import ast
import inspect
import re
from pathlib import Path
from typing import NamedTuple

ROOTS = {"xp", "_xp", "cupy"}
# Function: class of its result. A class makes an instance of itself.
RESULTS = {
    ("cuda", "get_current_stream"): ("cuda", "Stream"),
    ("cuda", "alloc_pinned_memory"): ("cuda", "PinnedMemoryPointer"),
    ("get_default_memory_pool",): ("cuda", "MemoryPool"),
    ("RawModule", "get_function"): ("RawKernel",),
}


class Use(NamedTuple):
    """One use: the path, and for a call the number of its arguments and their names."""

    place: str
    path: tuple[str, ...]
    count: int | None = None
    names: frozenset[str] = frozenset()


class Reader(ast.NodeVisitor):
    """Collects the uses of one file; is_class says which paths are classes."""

    def __init__(self, file, is_class):
        self.file, self.is_class = file, is_class
        self.uses: list[Use] = []
        self.known: list[dict] = [{}]  # names of the file and of the functions around
        self.own: dict[str, tuple] = {}  # attributes of self
        self.made: set[str] = set()  # those of them that are objects: a call is not their class's

    def path(self, node):
        """The path that an expression stands for, or None."""
        if isinstance(node, ast.Name):
            named = next((known[node.id] for known in reversed(self.known) if node.id in known),
                         None)
            return () if node.id in ROOTS else named
        if isinstance(node, ast.Attribute):
            if node.attr in ROOTS:
                return ()
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return self.own.get(node.attr)
            base = self.path(node.value)
            return None if base is None else (*base, node.attr)
        if isinstance(node, ast.Call):
            made = self.path(node.func)
            return made if made and self.is_class(made) else RESULTS.get(made)
        return None

    def visit_FunctionDef(self, node):
        self.known.append({})
        self.generic_visit(node)
        self.known.pop()

    def visit_Assign(self, node):
        for goal in node.targets:
            pairs = [(goal, node.value)]
            if isinstance(goal, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(goal.elts, node.value.elts, strict=True))
            for to, value in pairs:
                if path := self.path(value):
                    if isinstance(to, ast.Name):
                        self.known[-1][to.id] = path
                    elif isinstance(to, ast.Attribute) and to.attr not in ROOTS:
                        self.own[to.attr] = path
                        if isinstance(value, ast.Call):
                            self.made.add(to.attr)
        self.generic_visit(node)

    def visit_Call(self, node):
        if path := self.path(node.func):
            if isinstance(node.func, ast.Attribute) and node.func.attr in self.made:
                path = (*path, "__call__")
            exact = not any(isinstance(one, ast.Starred) for one in node.args)
            self.uses.append(Use(f"{self.file}:{node.lineno}", path,
                                 len(node.args) if exact else None,
                                 frozenset(word.arg for word in node.keywords if word.arg)))
        self.generic_visit(node)

    def visit_Attribute(self, node):
        if path := self.path(node):
            self.uses.append(Use(f"{self.file}:{node.lineno}", path))
        self.generic_visit(node)


def uses_in(file, source, is_class):
    """Every use of CuPy in a source."""
    reader = Reader(file, is_class)
    reader.visit(ast.parse(source))
    return reader.uses


def method_calls(file, source, methods):
    """Calls of these methods on anything but self or a module, as uses of an array's methods."""
    calls = [node for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
             and node.func.attr in methods
             and not (isinstance(node.func.value, ast.Name)
                      and node.func.value.id in {"self", "np", "math"})]
    return [Use(f"{file}:{node.lineno}", ("ndarray", node.func.attr), None,
                frozenset(word.arg for word in node.keywords if word.arg)) for node in calls]


# --- what CuPy itself says


class Compiled:
    """A module of CuPy whose import needs a library of CUDA: it is read as a file instead.

    Cython writes every name, and the signature of every function, into the file.
    """

    def __init__(self, path: Path):
        self.text = path.read_bytes()

    def has(self, name: str) -> bool:
        """Whether the file has this name."""
        alone = re.search(rb"\0" + re.escape(name.encode()) + rb"\0", self.text)
        return alone is not None or self.signature(name) is not None

    def signature(self, name: str) -> str | None:
        """The text "name(parameters)" or None; a method's name is "Class.method"."""
        pattern = rb"\0(?:\w+ )?(" + re.escape(name.encode()) + rb"\([^\0\n]*\))"
        found = re.search(pattern, self.text)
        return found[1].decode() if found else None


def parameters(text: str) -> inspect.Signature:
    """The signature that the first line of a docstring gives: "f(int a, *, b=None) -> c"."""
    inside = text.partition("\n")[0].partition("(")[2].rpartition(")")[0].replace("\\", "")
    found, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in re.split(r",\s*(?![^()\[\]]*[)\]])", inside):
        name, _, default = part.strip().partition("=")
        if part.strip() in ("", "/", "*"):
            kind = inspect.Parameter.KEYWORD_ONLY if part.strip() == "*" else kind
            continue
        name = name.split()[-1]
        stars = {"**": inspect.Parameter.VAR_KEYWORD, "*": inspect.Parameter.VAR_POSITIONAL}
        own = next((stars[mark] for mark in stars if name.startswith(mark)), kind)
        found.append(inspect.Parameter(
            name.lstrip("*"), own,
            default=default if default and own is kind else inspect.Parameter.empty))
        if own is inspect.Parameter.VAR_POSITIONAL:
            kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([one for one in found if one.name != "self"])


def signature(thing) -> inspect.Signature:
    """The signature of a function or class of CuPy, without self."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return parameters(thing.__doc__ or "")
    return found.replace(parameters=[one for one in found.parameters.values()
                                     if one.name != "self"])


def misfit(found: inspect.Signature, use: Use) -> str | None:
    """Why a call does not fit a signature, or None."""
    count = use.count or 0
    try:
        bind = found.bind if use.count is not None else found.bind_partial
        bind(*[None] * count, **dict.fromkeys(use.names))
    except TypeError as error:
        return f"{use.place}: {'.'.join(use.path)}{found}: {error}"
    return None
