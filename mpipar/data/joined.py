"""The ids of documents from the ids of their windows; see `mpipar.data.documents`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from mpipar.data.documents import OVERLAP, WINDOW, End, Window, windows

BATCH = 16 * WINDOW  # characters that the library gets at once, for its threads


@dataclass(frozen=True)
class Encoded:
    """A window and its ids (n,). span_of(number) -> (from, to): the characters of an id.

    skipped: ids at the beginning that the window before has already. begin: where the others begin.
    """

    window: Window
    ids: np.ndarray
    span_of: Callable[[int], tuple[int, int]]
    skipped: int = 0
    begin: int = 0

    def behind(self, number: int, character: int) -> Encoded:
        """Without the first ids, which lie before this character."""
        return replace(self, ids=self.ids[number:], skipped=number, begin=character)

    def span(self, place: int) -> tuple[int, int]:
        """The characters of the id at this place, in the window's text."""
        return self.span_of(place + self.skipped)

    def first_from(self, character: int) -> int:
        """The place of the first id that begins with this character or a later one."""
        return bisect_left(range(len(self.ids)), character, key=lambda place: self.span(place)[0])


def encoded_documents(tokenizer, pieces, size: int = WINDOW,
                      overlap: int = OVERLAP) -> Iterator[tuple[np.ndarray, End, int]]:
    """(ids, what ends behind them, head of the document) of all documents, in order.

    pieces: see `read_documents`. size, overlap: see `windows`.
    """
    overlap = 0 if tokenizer.is_bytes else overlap  # bytes need no context
    yield from joined(tokenizer, _encoded(tokenizer, windows(pieces, size, overlap)), overlap)


def _encoded(tokenizer, found: Iterable[Window]) -> Iterator[Encoded]:
    """The windows with their ids, many at a time."""
    batch, characters = [], 0
    for window in found:
        batch.append(window)
        characters += len(window.text)
        if characters >= BATCH:
            yield from _of_batch(tokenizer, batch)
            batch, characters = [], 0
    yield from _of_batch(tokenizer, batch)


def _of_batch(tokenizer, batch: list[Window]) -> Iterator[Encoded]:
    answers = tokenizer.encode_all([window.text for window in batch])
    for window, (ids, span_of) in zip(batch, answers, strict=True):
        yield Encoded(window, ids, span_of)


def joined(tokenizer, found: Iterable[Encoded],
           common: int) -> Iterator[tuple[np.ndarray, End, int]]:
    """The ids of each document, window by window. common: characters that two windows both have."""
    before = None
    for after in found:
        if before is None:
            before = after
        else:
            ids, before = meeting(tokenizer, before, after, common)
            yield ids, End.NOTHING, after.window.head
        if after.window.end is not End.NOTHING:
            yield before.ids, after.window.end, after.window.head
            before = None


def meeting(tokenizer, before: Encoded, after: Encoded, common: int) -> tuple[np.ndarray, Encoded]:
    """(ids of the window before, as far as they are certain, and what follows them) of two windows.

    They meet at the id nearest to the middle of the common text that both windows have. If they
    have none in common, as in a long row of equal letters, the text at the middle is encoded alone.
    """
    if not common:
        return before.ids, after
    own, offset = _beginnings(after, 0, common), len(before.window.text) - common
    same = [(abs(key[0] - common // 2), stop, own[key], key[0])
            for key, stop in _beginnings(before, offset, offset + common).items() if key in own]
    if same:
        _, stop, start, character = min(same)
        return before.ids[:stop], after.behind(start, character)
    middle = common // 2
    stop = before.first_from(offset + middle)
    while stop and before.span(stop - 1)[1] > offset + middle:  # it lies across the middle
        stop -= 1
    first = (before.span(stop - 1)[1] if stop else before.begin) - offset
    start = after.first_from(max(middle, first))
    last = after.span(start)[0] if start < len(after.ids) else len(after.window.text)
    text = (before.window.text[first + offset:] + after.window.text[common:])[:last - first]
    (between, span_of), = tokenizer.encode_all([text])
    between, rest = between.astype(before.ids.dtype), after.behind(start, last)
    if not len(rest.ids) and after.window.end is End.NOTHING and len(between):
        begin, end = span_of(len(between) - 1)
        if end == len(text) and end - begin >= common:
            rest, between = _held(after, text[begin:], between[-1:], common), between[:-1]
    return np.concatenate([before.ids[:stop], between]), rest


def _held(after: Encoded, text: str, ids: np.ndarray, common: int) -> Encoded:
    """A window of one id whose text may go on behind `after`, as an unknown word's does.

    How long it is does not decide what it is. So only its beginning is kept, and what the next
    window has too.
    """
    text = text if len(text) <= 2 * common else text[:common] + text[-common:]
    return Encoded(replace(after.window, text=text), ids, lambda _: (0, len(text)))


def _beginnings(one: Encoded, first: int, last: int) -> dict:
    """{(from - first, to - first, id): place} of ids in these characters of a window.

    A character of several bytes may have several ids. Only at the first of them can texts be cut.
    """
    found, low = {}, one.first_from(first)
    for place in range(low, one.first_from(last)):
        begin, end = one.span(place)
        if place == 0 or one.span(place - 1)[0] < begin:
            found[begin - first, end - first, int(one.ids[place])] = place
    return found
