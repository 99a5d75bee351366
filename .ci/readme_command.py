"""Print a command of README.md: the fenced block right after its comment.

``python3 .ci/readme_command.py test`` prints the block after ``<!-- command: test -->``.
"""

import re
import sys
from pathlib import Path


def readme_command(text: str, name: str) -> str:
    """Return the shell command of that name; LookupError where the README has no such block."""
    pattern = rf"<!-- command: {re.escape(name)} -->\s*\n```[a-z]*\n(.*?)\n```"
    match = re.search(pattern, text, re.DOTALL)
    if match is None:
        raise LookupError(f"README.md has no fenced block after <!-- command: {name} -->")
    return match[1]


if __name__ == "__main__":
    readme = Path(__file__).resolve().parent.parent / "README.md"
    print(readme_command(readme.read_text(encoding="utf-8"), sys.argv[1]))
