"""What Perfetto asks of slices and arrows."""

from collections import defaultdict


def slices(found):
    rows = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            assert event["dur"] > 0
            rows[event["pid"], event["tid"]].append(
                (event["ts"], event["ts"] + event["dur"], event["name"])
            )
    return rows


def check_slices(found):
    """Slices of a row must nest or follow each other; times are microseconds, whole nanoseconds."""
    for row in slices(found).values():
        row.sort(key=lambda piece: (piece[0], -piece[1]))
        around = []
        for piece in row:
            while around and around[-1][1] <= piece[0] + 1e-4:
                around.pop()
            assert not around or piece[1] <= around[-1][1] + 1e-4, (around[-1], piece)
            around.append(piece)


def innermost(found):
    """{event id, phase: (start, end) of the slice that Perfetto joins an arrow's end to}, in ns."""
    rows, joined = defaultdict(list), {}
    for event in found:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            rows[event["pid"], event["tid"]].append(
                (start, start + round(event["dur"] * 1000), event["name"])
            )
    for event in found:
        if event["ph"] in "sf":
            time = round(event["ts"] * 1000)
            inside = [one for one in rows[event["pid"], event["tid"]] if one[0] <= time < one[1]]
            assert inside, event
            assert any(name.endswith(event["name"]) for *_, name in inside), event
            joined[event["id"], event["ph"]] = max(inside, key=lambda one: (one[0], -one[1]))
    return joined


def check_arrows(found):
    """Each arrow begins and ends inside a slice of its name; returns the pairs of ends.

    Perfetto draws it from the end of the first slice to the start of the second: not backwards.
    """
    ends, joined = defaultdict(dict), innermost(found)
    for event in found:
        if event["ph"] in "sf":
            assert isinstance(event["id"], int), "what Perfetto can't read as a number, it drops"
            assert event["ph"] not in ends[event["id"]], "ids are unique"
            ends[event["id"]][event["ph"]] = event
            assert (event.get("bp") == "e") == (event["ph"] == "f")
    assert all(set(pair) == {"s", "f"} for pair in ends.values())
    assert all(joined[number, "s"][1] <= joined[number, "f"][0] for number in ends)
    return [(pair["s"], pair["f"]) for pair in ends.values()]
