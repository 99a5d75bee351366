"""Runs a program of this folder by name, or lists them: `python -m bench [NAME [FLAGS]]`."""

import ast
import re
import runpy
import sys
from pathlib import Path

from mpipar.errors import EXIT_USAGE, suggestion

FOLDER = Path(__file__).parent
STARTED = re.compile(r"""^if __name__ == "__main__":$|\.started\(__name__\)$""", re.MULTILINE)


def programs() -> dict[str, Path]:
    """Return each program's name and its file, in the order of names."""
    files = (
        path
        for path in FOLDER.rglob("*.py")
        if path != Path(__file__) and STARTED.search(path.read_text())
    )
    named = {path.relative_to(FOLDER).with_suffix("").parts: path for path in files}
    return {".".join(parts).removesuffix(".__main__"): named[parts] for parts in sorted(named)}


def main(argv: list[str]) -> int:
    """List the programs, or run the named one in this process; return the exit code."""
    found = programs()
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m bench NAME [FLAGS]; NAME --help says more. NAME is one of\n")
        width = max(map(len, found))
        for name, path in found.items():
            doc = ast.get_docstring(ast.parse(path.read_text())) or ""
            print(f"  {name:{width}}  {doc.partition(chr(10))[0]}")
        return 0
    name = argv[0]
    if name not in found:
        hint = suggestion(name, list(found))
        print(
            f"python -m bench: no program {name!r}{hint}; python -m bench lists all",
            file=sys.stderr,
        )
        return EXIT_USAGE
    sys.argv = [str(found[name]), *argv[1:]]
    runpy.run_module(f"bench.{name}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
