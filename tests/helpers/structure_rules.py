"""The structure rules, each a function: a module's name and source -> what is wrong in it."""

import ast
import functools
import sys
from graphlib import CycleError, TopologicalSorter

from helpers import REPOSITORY

# From the ground up: a folder imports only from itself and from the folders named before it.
FLOORS = """cache errors ops comm config layers models pipeline train run.files run.process run.data
    run.checkpoint run.console run.trace run study.schedules study.explain
    study.plan study.trace study interconnect study.examples commands cli __main__""".split()
HOUSES = ("run", "study")  # their folders are floors of their own
PACKAGE = REPOSITORY / "mpipar"
WIRE = {
    "comm.collective_check",
    "comm.device",
    "comm.groups",
    "comm.half_precision",
    "comm.nccl",
    "comm.mpi",
    "comm.algorithms",  # and all modules of this folder
}
# What these send stays out of the records.
REPORTS = {"run.trace.clock", "comm.objects", "comm.hosts", "run.process.self_test"}
# The benchmark makes the same calls beside those of comm.
BARE = {f"interconnect.{name}" for name in "cases compiled groups job measure vet".split()}
IMPORT_MPI = WIRE | REPORTS | BARE | {"run.process.mpi", "comm.launcher", "commands.doctor"}
CALL_MPI = WIRE | REPORTS | BARE | {"run.process.session", "run.process.mpi"}
MPI_CALLS = set(
    """Allgather Allgatherv Allreduce Alltoall Alltoallv Barrier Bcast Gather Gatherv
    Iallgather Iallgatherv Iallreduce Ibarrier Ireduce_scatter Ireduce_scatter_block Irecv
    Isend Issend Probe Recv Reduce Reduce_scatter_block Scatter Send Sendrecv Split
    Split_type Ssend""".split()
)
PICKLING = {"bcast", "allgather", "allreduce", "alltoall"}  # mpi4py's lower-case methods
# Modules that are an extra's from their first line on: nobody imports them at the top.
EXTRAS = {"ops.numba_kernels": "numba"}
CORE = {"numpy", "mpi4py", "safetensors", "ml_dtypes", "threadpoolctl", "tqdm", "mpipar"}
parsed = functools.cache(ast.parse)  # each rule reads every source


def module_name(path):
    """mpipar/ops/__init__.py -> ops; mpipar/comm/group.py -> comm."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


SOURCES = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module, source):
    """(line, module of this package or outside name, inside a function?) of each import."""
    found = []
    tree = parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(node.lineno, name, node not in tree.body) for name in names]
    return found


def target(name):
    """The module that an imported name lies in: mpipar.comm.group.Comm -> comm.group."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in SOURCES:
        parts.pop()
    return ".".join(parts) or "__init__"


def folder(module):
    """ops.cuda.gemm -> ops, study.schedules.draw -> study.schedules, run.resume -> run."""
    parts = module.split(".")
    inner = "/".join(parts[:2])
    if parts[0] in HOUSES and (PACKAGE / inner).is_dir():
        return inner.replace("/", ".")
    return parts[0]


def circle(graph):
    """Modules that import each other in a circle, or None."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return None


def import_graph(sources):
    """What imports what inside the package."""
    return {
        module: {target(name) for _, name, _ in imports(module, source) if "mpipar." in name}
        - {module, "__init__"}
        for module, source in sources.items()
    }


# --- the rules: (module, source) -> problems


def floor_problems(module, source):
    own = folder(module)
    if own not in [*FLOORS, "__init__"]:
        return [f"{module}: stands on no floor; say where in FLOORS"]
    below = FLOORS[: FLOORS.index(own) + 1] if own in FLOORS else []
    return [
        f"{module}:{line}: {own} imports {name} from above"
        for line, name, _ in imports(module, source)
        if name.split(".")[0] == "mpipar" and folder(target(name)) not in [*below, "__init__"]
    ]


def outside_problems(module, source):
    """Optional packages come late; nothing imports the tests or the benchmarks."""
    found = []
    for line, name, late in imports(module, source):
        top = name.split(".")[0]
        if top in ("tests", "bench", "docs"):
            found.append(f"{module}:{line}: the package imports {name}")
        elif not late and target(name) in EXTRAS:
            found.append(f"{module}:{line}: {name} is an extra's: import it where it is needed")
        elif not late and top not in (
            CORE | sys.stdlib_module_names | {"__future__", EXTRAS.get(module)}
        ):
            found.append(f"{module}:{line}: {name} is optional: import it where it is needed")
    return found


def mpi_problems(module, source):
    """Only the wire imports MPI or calls a communicator, by buffers and inside functions."""
    found, algorithms = [], "comm.algorithms"
    place = algorithms if module.startswith(f"{algorithms}.") else module
    for line, name, late in imports(module, source):
        if name.startswith("mpi4py."):
            if place not in IMPORT_MPI:
                found.append(f"{module}:{line}: imports {name}")
            if not late:
                found.append(f"{module}:{line}: {name} starts MPI as soon as this is imported")
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in MPI_CALLS and place not in CALL_MPI:
                found.append(f"{module}:{node.lineno}: calls {node.func.attr}")
            if node.func.attr in PICKLING:
                found.append(f"{module}:{node.lineno}: {node.func.attr} pickles")
    return found


def array_math_problems(module, source):
    """Layers and models reshape, transpose and slice; all arithmetic on arrays is in ops.

    In a class with a `forward`, outside __init__, operators may only compute shapes and indices.
    They stand inside a subscript, or in the arguments of reshape, transpose, range or a method of
    ops that makes an array. `|` in a type is none. NumPy is not used there at all.
    """
    if module.split(".")[0] not in ("layers", "models"):
        return []
    tree, found = parsed(source), []
    if module != "layers.param":
        found += [
            f"{module}:{line}: imports {name}"
            for line, name, _ in imports(module, source)
            if name.split(".")[0] in ("numpy", "cupy")
        ]
    methods = [
        item
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and "forward" in [getattr(one, "name", "") for one in node.body]
        for item in node.body
        if isinstance(item, ast.FunctionDef)
        if item.name != "__init__"
    ]
    if module.startswith("layers.parallel."):
        methods += [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for method in methods:
        allowed = set()
        for node in ast.walk(method):
            if isinstance(node, ast.Subscript):
                allowed.update(ast.walk(node.slice))
            elif isinstance(node, ast.JoinedStr):
                allowed.update(ast.walk(node))
            elif annotation := getattr(node, "annotation", getattr(node, "returns", None)):
                allowed.update(ast.walk(annotation))
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("reshape", "transpose", "range", "empty", "zeros"):
                    for argument in node.args:
                        allowed.update(ast.walk(argument))
        found += [
            f"{module}:{node.lineno}: {method.name} computes with {type(node).__name__}"
            for node in ast.walk(method)
            if isinstance(node, (ast.BinOp, ast.AugAssign)) and node not in allowed
        ]
    return found


RULES = [
    floor_problems,
    outside_problems,
    mpi_problems,
    array_math_problems,
]
