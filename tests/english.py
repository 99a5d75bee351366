"""Finds the text of a page or a docstring, and those of its sentences that are too long."""

import ast
import re

MOST_WORDS = 25
# Parts without sentences: fenced code, what bench.docs generates, comments, pictures.
NO_TEXT = re.compile(r"^```.*?^```$|<!-- (?:run|measured|code|result|picture|table|map): "
                     r".*?<!-- end -->|<!--.*?-->|!\[[^]]*\]\([^)]*\)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
CODE = re.compile(r"``.+?``|`[^`]+`", re.DOTALL)
NEW_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#>]|\d+\.)\s)")
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)\"'*]*\s+")


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
    return [(getattr(node, "lineno", 1), text) for node in ast.walk(ast.parse(source))
            if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def docstring_paragraphs(docstring: str) -> list[str]:
    """The paragraphs of a docstring; indented blocks are commands, formulas and drawings."""
    return page_paragraphs(INDENTED.sub("\n", docstring))


def long_sentences(paragraphs: list[str]) -> list[str]:
    """The sentences with more than MOST_WORDS words; a word has a letter or a digit."""
    sentences = [one for part in paragraphs for one in END_OF_SENTENCE.split(part)]
    return [one for one in sentences
            if sum(bool(re.search(r"\w", word)) for word in one.split()) > MOST_WORDS]
