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
    yield from joined(tokenizer, _encoded(tokenizer, windows(pieces, size, overlap)), size)


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
           size: int) -> Iterator[tuple[np.ndarray, End, int]]:
    """The ids of each document, window by window. size: from one window's begin to the next's."""
    before = None
    for after in found:
        start = character = 0
        if before is not None:
            stop, between, start, character = meeting(tokenizer, before, after, size)
            yield np.concatenate([before.ids[:stop], between]), End.NOTHING, after.window.head
        before = after.behind(start, character)
        if after.window.end is not End.NOTHING:
            yield before.ids, after.window.end, after.window.head
            before = None


def meeting(tokenizer, before: Encoded, after: Encoded, size: int):
    """(end in the ids before, ids between, begin in the ids after, its character) of two windows.

    The place is the id nearest to the middle of the common text that both windows have. If they
    have none in common, as in a long row of equal letters, the text at the middle is encoded alone.
    """
    common = len(before.window.text) - size
    if not common:
        return len(before.ids), before.ids[:0], 0, 0
    own = _beginnings(after, 0, common)
    same = [(abs(key[0] - common // 2), stop, own[key], key[0])
            for key, stop in _beginnings(before, size, size + common).items() if key in own]
    if same:
        _, stop, start, character = min(same)
        return stop, before.ids[:0], start, character
    middle = common // 2
    stop = before.first_from(size + middle)
    while stop and before.span(stop - 1)[1] > size + middle:  # it lies across the middle
        stop -= 1
    first = (before.span(stop - 1)[1] if stop else before.begin) - size
    start = after.first_from(max(middle, first))
    last = after.span(start)[0] if start < len(after.ids) else len(after.window.text)
    text = before.window.text[first + size:] + after.window.text[common:]
    between = tokenizer.encode(text[:last - first])
    return stop, np.array(between, before.ids.dtype), start, last


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
