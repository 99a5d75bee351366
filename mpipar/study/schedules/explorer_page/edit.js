// Pointer and keyboard control of a panel's timeline: select a pass, drag it, undo.
const LEAST_DRAG = 4;  // pixels; anything shorter is a click

function listen(panel) {
  const svg = panel.part("svg");
  let drag = null;
  const boxAt = event => event.target.closest?.(".pass");
  const fixed = () => panel.choice === "measured";
  svg.addEventListener("pointerdown", event => {
    const box = boxAt(event);
    if (!box || event.button) return;
    const { rank, pass } = box.span;
    drag = { box, from: { rank, index: panel.schedule.programs[rank].indexOf(pass) },
             x: event.clientX, y: event.clientY, to: null, caret: drawing("line",
               { class: "caret", visibility: "hidden" }) };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", event => {
    if (!drag) return panel.tell(boxAt(event)?.span ?? panel.spanOf(panel.chosen));
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (fixed() || !drag.to && Math.hypot(dx, dy) < LEAST_DRAG) return;
    if (!drag.to) {
      drag.box.classList.add("dragged");
      svg.append(drag.box, drag.caret);
    }
    drag.box.setAttribute("transform", `translate(${dx} ${dy})`);
    drag.to = dropAt(panel, drag.box.span.pass, event);
    showCaret(panel, drag);
  });
  const end = drop => {
    if (!drag) return;
    const { box, from, to, caret } = drag;
    drag = null;
    caret.remove();
    box.removeAttribute("transform");
    box.classList.remove("dragged");
    if (drop && to) panel.move(from, to);
    else choose(panel, drop ? box.span.pass : null);
  };
  svg.addEventListener("pointerup", () => end(true));
  svg.addEventListener("pointercancel", () => end(false));
  svg.addEventListener("pointerleave", () => {
    if (!drag) panel.tell(panel.spanOf(panel.chosen));
  });
  svg.addEventListener("keydown", event => {
    if (event.key === "Escape" && drag) return end(false);
    const act = keyAction(panel, event, fixed());
    if (!act) return;
    event.preventDefault();
    act();
  });
}

/** Where a pass would go if it were dropped here: {rank, index}, counted without it. */
function dropAt(panel, pass, event) {
  const { time, rank } = panel.drawing.place(event), { p } = panel.schedule;
  const row = Math.min(Math.max(rank, 0), p - 1);
  return { rank: row, index: indexAt(panel, pass, row, time) };
}

/** The index on a worker at a given time, counted without the pass. */
function indexAt(panel, pass, rank, time) {
  return panel.timeline.spans[rank].filter(span => span.pass !== pass
    && (span.start + span.end) / 2 < time).length;
}

/** A line where the dragged pass would be inserted. */
function showCaret(panel, { box, to, caret }) {
  const others = panel.timeline.spans[to.rank].filter(span => span.pass !== box.span.pass);
  const x = panel.drawing.x(others[to.index]?.start ?? others.at(-1)?.end ?? 0);
  const place = { x1: x, x2: x, y1: barTop(to.rank) - 4, y2: barTop(to.rank) + BAR + 4 };
  for (const [name, value] of Object.entries(place)) caret.setAttribute(name, value);
  caret.setAttribute("visibility", "visible");
}

function choose(panel, pass) {
  panel.chosen = pass;
  panel.changed();
  panel.part("svg").focus({ preventScroll: true });
}

/** The action of a key, or null: arrows select the next pass; with Shift they move it. */
function keyAction(panel, { key, shiftKey, ctrlKey, metaKey }, fixed) {
  if (key === (ctrlKey || metaKey ? "z" : "u")) return () => panel.undo();
  if (key === "Escape") return () => choose(panel, null);
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
  if (!step || !panel.timeline) return null;
  const span = panel.spanOf(panel.chosen), { spans } = panel.timeline;
  if (!span) return () => choose(panel, spans.flat()[0].pass);
  const own = spans[span.rank], index = own.indexOf(span), rank = span.rank + step[0];
  if (!spans[rank]) return () => {};
  const middle = (span.start + span.end) / 2;
  const at = step[0] ? indexAt(panel, span.pass, rank, middle) : index + step[1];
  if (!shiftKey) {
    const next = spans[rank][Math.min(Math.max(at, 0), spans[rank].length - 1)];
    return () => choose(panel, next?.pass ?? span.pass);
  }
  if (fixed || at < 0 || !step[0] && at >= own.length) return () => {};
  return () => panel.move({ rank: span.rank, index }, { rank, index: at });
}
