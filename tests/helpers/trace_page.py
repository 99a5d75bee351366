"""Places on a trace's page that its tests look up."""

from trace_cases import blocking, record, span, trace

HOOK = "document.getElementById('base').getBoundingClientRect()"


def example():
    """Two ranks: rank 1 is 30 ms late at a barrier; then a message, and another axis."""
    return trace(
        [
            [blocking("all_reduce", "block3.ffn.down", "tp", 10, 42, payload_bytes=2**17,
                      wire_bytes=2**17, mb=2, phase="F", cut="mpipar/layers/parallel/row.py:13"),
             record("send", "activations", "pp", 60, 80, 80, peer=1, tag=3),
             blocking("all_gather", "loss", "world", 90, 99)],
            [blocking("all_reduce", "block3.ffn.down", "tp", 40, 41, payload_bytes=2**17, mb=2),
             record("recv", "activations", "pp", 42, 50, 63, peer=0, tag=3),
             blocking("all_gather", "loss", "world", 70, 98)],
        ],
        [[span("F", 0, 45, mb=2), span("opt", 81, 89, mb=-1)], [span("F", 2, 44, mb=2)]],
    )  # fmt: skip


def tooltip(window):
    """The title and the lines of the tooltip, None if it is hidden."""
    return window.run("""
        const tip = document.getElementById("tip");
        if (tip.hidden) return null;
        const text = tag => [...tip.querySelectorAll(tag)].map(one => one.textContent.trim());
        const [names, values] = [text("dt"), text("dd")];
        return [text("h3")[0], Object.fromEntries(names.map((name, i) => [name, values[i]]))];
    """)
