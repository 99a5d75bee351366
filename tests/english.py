"""Extracts the text of pages and docstrings, and finds words for which there are better ones."""

import ast
import re

# Words that are no English of this field, and what to write instead; kept short.
SUBSTITUTIONS = {
    r"behind": "after, or name the place",
    r"(?:go|goes|going|went|gone) on": "continue, resume",
    r"anew": "again, or the verb with re-",
    r"made again": "recomputed",
    r"(?:share|shares|shared|sharing) out": "shard, split, distribute",
    r"alike": "identical, in the same way",
    r"(?:some|every)body": "who it is: a rank, a user, a reader",
    r"as far as": "where, if, up to",
    r"an own": "its own, one of its own",
    r"of no use": "useless, unused",
    r"in its turn": "leave it out, or then",
    r"by (?:it)?self alone": "alone",
}
WORDS = re.compile(rf"\b(?:{'|'.join(SUBSTITUTIONS)})\b", re.IGNORECASE)
# First words of a function's docstring that tell what it is instead of what it does.
NOT_IMPERATIVE = {
    "The",
    "A",
    "An",
    "What",
    "Whether",
    "How",
    "Which",
    "Where",
    "When",
    "Why",
    "Who",
    "Its",
    "All",
    "Every",
    "Each",
    "One",
    "Of",
    "As",
    "From",
    "This",
    "These",
    "That",
    "Seconds",
    "Bytes",
    "Rows",
    "Nanoseconds",
    "Ranks",
    "Everything",
    "Called",
    "Blocks",
    "Weights",
    "Those",
    "In",
    "For",
    "If",
    "Same",
    "Like",
    "Returns",
    "Gives",
    "True",
    "Number",
    "With",
    "Without",
    "On",
    "To",
    "By",
}
# Parts without sentences: fenced code, what bench.docs generates, comments, pictures.
NO_TEXT = re.compile(
    r"^```.*?^```$|<!-- (?:run|measured|code|result|picture|table|map): "
    r".*?<!-- end -->|<!--.*?-->|!\[[^]]*\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
NEW_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#>]|\d+\.)\s)")
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)


def page_paragraphs(markdown: str) -> list[str]:
    """The paragraphs, headings and list items of a Markdown page.

    A link counts as its words and a piece of code as one word; tables do not count.
    """
    text = LINK.sub(r"\1", NO_TEXT.sub("\n\n", markdown))
    text = re.sub(r"^\|.*$", "", CODE.sub("code", text), flags=re.MULTILINE)
    return [" ".join(part.split()) for part in NEW_PARAGRAPH.split(text) if part.strip()]


def docstrings(source: str) -> list[tuple[int, str]]:
    """(line, docstring) of a module, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [
        (getattr(node, "lineno", 1), text)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


def docstring_paragraphs(docstring: str) -> list[str]:
    """The paragraphs of a docstring; indented blocks are commands, formulas and drawings."""
    return page_paragraphs(INDENTED.sub("\n", docstring))


def clumsy_words(paragraphs: list[str]) -> list[str]:
    """Return each occurrence of a word of SUBSTITUTIONS: what to write instead, and where."""
    return [
        f"{match[0]!r}: write {advice}: {part[max(0, match.start() - 40) : match.end() + 40]}"
        for part in paragraphs
        for match in WORDS.finditer(part)
        for pattern, advice in SUBSTITUTIONS.items()
        if re.fullmatch(pattern, match[0], re.IGNORECASE)
    ]


def not_imperative(source: str) -> list[tuple[int, str]]:
    """Return (line, first line) of public functions' docstrings that do not say what to do.

    A property is a thing: its docstring names it.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [
        (node.lineno, text.splitlines()[0])
        for node in functions
        if not node.name.startswith("_")
        and (text := ast.get_docstring(node))
        and not any("property" in ast.unparse(one) for one in node.decorator_list)
        and text.split()[0] in NOT_IMPERATIVE
    ]
