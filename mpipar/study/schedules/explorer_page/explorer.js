// The page. First a panel: a timeline as SVG, with a row for each worker and a box for each pass.
const GUTTER = 84, ROW = 38, BAR = 27, RULER = 24, RIGHT = 10;  // pixels
const LETTER = 7.4, LEAST_TICK = 58;  // width of a letter of a label; distance of two ticks
const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
                OVERLAP_F_B: "forward and backward, overlapped" };

/** Formats a number with at most six digits: 33, 0.25, 12.3457. */
const number = value => `${+value.toPrecision(6)}`;
const barTop = rank => RULER + rank * ROW + (ROW - BAR) / 2;

/** The drawing of one timeline. name: distinguishes its hatching from that of other drawings. */
class Drawing {
  constructor(svg, name) { Object.assign(this, { svg, name, scale: 1 }); }

  x(time) { return GUTTER + time * this.scale; }

  /** width: total pixels. longest: the time that they represent. arrows: whether messages are
      drawn. path: the spans of the critical path, or null. marks: {chosen, unable, needs}, the
      passes that are outlined; unable: problems of the proof. */
  draw(timeline, { width, longest, arrows, path, marks }) {
    const { schedule, spans, messages } = timeline, height = RULER + ROW * schedule.p + 4;
    this.timeline = timeline;
    this.onPath = path ? new Set(path) : null;
    this.scale = (width - GUTTER - RIGHT) / longest;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.style.width = `${width}px`;
    this.svg.style.height = `${height}px`;
    this.boxes = new Map(spans.flat().map(span => [span.pass, this.box(span, marks)]));
    this.svg.replaceChildren(this.patterns(), ...this.ruler(longest, width, height),
      ...spans.flatMap((_, rank) => this.row(rank)), ...this.boxes.values(),
      ...arrows ? messages.map(message => this.arrow(message)) : [],
      ...marks.unable.flatMap(problem => this.lacks(problem)));
  }

  /** The hatching of idle time, and the head of an arrow. */
  patterns() {
    const made = drawing("defs");
    const hatch = drawing("pattern", { id: `idle-${this.name}`, width: 7, height: 7,
      patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    hatch.append(drawing("rect", { width: 7, height: 7, class: "hatch" }),
      drawing("line", { x1: 3.5, x2: 3.5, y1: 0, y2: 7, class: "hatch-line" }));
    const head = drawing("marker", { id: `head-${this.name}`, viewBox: "0 0 8 8", refX: 7, refY: 4,
      markerWidth: 7, markerHeight: 7, orient: "auto", markerUnits: "userSpaceOnUse" });
    head.append(drawing("path", { d: "M0 0L8 4L0 8z", class: "head" }));
    made.append(hatch, head);
    return made;
  }

  ruler(longest, width, height) {
    const room = Math.max(2, Math.floor((width - GUTTER) / LEAST_TICK));
    return ticks(0, longest, room).flatMap(time => [
      drawing("line", { x1: this.x(time), x2: this.x(time), y1: RULER - 5, y2: height,
                        class: "tick" }),
      drawing("text", { x: this.x(time), y: RULER - 9, "text-anchor": "middle" }, number(time))]);
  }

  /** A worker's name, and its whole time as idle time, over which its passes are drawn. */
  row(rank) {
    const { busy, makespan } = this.timeline, share = makespan ? busy[rank] / makespan : 0;
    return [
      drawing("text", { x: 4, y: barTop(rank) + 11, class: "name" }, `worker ${rank}`),
      drawing("text", { x: 4, y: barTop(rank) + 25 }, `busy ${percent(share)}`),
      drawing("rect", { x: this.x(0), y: barTop(rank), width: makespan * this.scale, height: BAR,
                        fill: `url(#idle-${this.name})` })];
  }

  box(span, { chosen, unable, needs }) {
    const { pass, rank, start, end } = span, { schedule } = this.timeline;
    const width = Math.max((end - start) * this.scale, 0.5), held = schedule.stagesOf(rank);
    const late = held.indexOf(pass.stage) * 2 >= held.length && held.length > 1;
    const classes = { late, chosen: pass === chosen, needs: needs.has(pass),
      unable: span.forced || unable.some(({ instr }) => instr === pass),
      "off-path": this.onPath && !this.onPath.has(span) };
    const made = drawing("g", { class: ["pass", pass.kind, ...Object.keys(classes).filter(
      name => classes[name])].join(" ") });
    made.append(drawing("rect", { x: this.x(start), y: barTop(rank), width, height: BAR, rx: 3 }));
    const text = schedule.label(pass);
    if (text.length * LETTER + 3 <= width)
      made.append(drawing("text", { x: this.x(start) + width / 2, y: barTop(rank) + 18 }, text));
    made.span = span;
    return made;
  }

  /** From the end of the pass that makes a message to its arrival at the worker that needs it. */
  arrow({ from, to, arrives }) {
    const down = to.rank > from.rank, [x1, x2] = [this.x(from.end), this.x(arrives)];
    const [y1, y2] = [barTop(from.rank) + (down ? BAR : 0), barTop(to.rank) + (down ? 0 : BAR)];
    const on = this.onPath?.has(to) && to.message?.from === from && this.onPath.has(from);
    return drawing("line", { x1, x2, y1, y2, "marker-end": `url(#head-${this.name})`,
      class: `message${this.onPath ? on ? " on-path" : " off-path" : ""}` });
  }

  /** From each pass that a problem names as needed to the pass that runs without it. */
  lacks({ instr, needs }) {
    const own = this.boxes.get(instr)?.span;
    const found = [...this.boxes.values()].map(one => one.span).filter(({ pass }) =>
      needs.some(need => pass.parts.some(part => part.kind === need.kind
        && part.stage === need.stage && part.mb === need.mb)));
    if (!own) return [];
    const middle = span => [this.x((span.start + span.end) / 2), barTop(span.rank)];
    return found.map(other => {
      const [x1, y1] = middle(other), [x2, y2] = middle(own), lift = Math.min(y1, y2) - 14;
      return drawing("path", { d: `M${x1} ${y1}C${x1} ${lift} ${x2} ${lift} ${x2} ${y2}`,
                               class: "lack", "marker-end": `url(#head-${this.name})` });
    });
  }

  /** Converts a point in the window to {time, rank}, which may be out of range. */
  place(event) {
    const bounds = this.svg.getBoundingClientRect(), wide = this.svg.viewBox.baseVal.width;
    const factor = wide / bounds.width;
    return { time: ((event.clientX - bounds.x) * factor - GUTTER) / this.scale,
             rank: Math.floor(((event.clientY - bounds.y) * factor - RULER) / ROW) };
  }
}


// A schedule with its options, its drawing, and the verdict of the proof.
const PROVED = "proved: every pass once and in order, no deadlock even if every send is"
  + " synchronous";

class Panel {
  /** changed: called without arguments after each change that the page must draw. */
  constructor(id, options, changed) {
    this.root = find(id);
    this.root.append(find("panel").content.cloneNode(true));
    this.part = selector => this.root.querySelector(selector);
    this.drawing = new Drawing(this.part("svg"), id);
    this.changed = changed;
    this.history = [];  // programs before each change
    for (const [value, text] of options) this.part(".choice").append(element("option", text,
      { value }));
    this.chunkSelect = this.part(".chunks select");
    this.part(".choice").onchange = this.chunkSelect.onchange = () => this.changed();
    this.part(".undo").onclick = () => this.undo();
    this.part(".reset").onclick = () => this.restore(this.history[0]);
    this.part(".csv").onclick = () => this.save();
    listen(this);
  }

  get choice() { return this.part(".choice").value; }

  /** Load the selected schedule for these counts, which discards the reader's own order. */
  choose(orders, p, m) {
    const family = page.families[this.choice], before = this.chunkSelect.value;
    const counts = family?.chunks ?? [];
    this.part(".chunks").hidden = counts.length < 2;
    this.chunkSelect.replaceChildren(...counts.map(count => element("option", count)));
    if (counts.includes(+before)) this.chunkSelect.value = before;
    const key = family ? `${this.choice} ${p} ${m} ${this.chunkSelect.value}` : this.choice;
    if (key === this.key) return;
    Object.assign(this, { key, history: [], chosen: null, refused: "", schedule: null });
    if (this.choice === "own" || this.choice === "measured")
      this.schedule = new Schedule(page.own.schedule);
    else if (Array.isArray(orders[key]))
      this.schedule = new Schedule({ name: this.choice, p, m, programs: orders[key],
        stageToRank: page.stageToRank[`${family.placement} ${p} ${this.chunkSelect.value}`] });
    else this.refused = this.choice && orders[key];
  }

  /** Time and prove the order. costsOf(schedule): see `simulate`. */
  compute(costsOf) {
    const { schedule } = this;
    this.timeline = !schedule ? null
      : this.choice === "measured" ? measured(schedule) : simulate(schedule, costsOf(schedule));
    this.problems = schedule ? problemsOf(schedule) : [];
    const first = this.history[0];
    this.before = first ? simulate(schedule.changed(first), costsOf(schedule)).makespan : null;
  }

  draw({ zoom, longest, arrows, path, unit }) {
    const { timeline, schedule, problems } = this;
    this.unit = unit;
    this.part("h2").textContent = schedule ? titleOf(schedule, this.choice, this.history.length)
      : this.choice || "";
    for (const name of [".undo", ".reset"]) this.part(name).disabled = !this.history.length;
    this.part(".edits").hidden = !schedule || this.choice === "measured";
    this.part(".scroll").hidden = !schedule;
    this.part(".verdict").textContent = this.verdict();
    this.part(".verdict").classList.toggle("broken", problems.length > 0 || !!this.refused);
    const more = this.part(".more");
    more.hidden = problems.length < 2;
    more.firstElementChild.textContent = `${problems.length - 1} more problems, which may follow`
      + " from the first";
    more.lastElementChild.replaceChildren(...problems.slice(1, 9).map(({ text }) =>
      element("li", text)));
    if (!schedule) return this.part("svg").replaceChildren();
    const width = Math.max(320, this.part(".scroll").clientWidth) * zoom;
    const needs = new Set(this.chosen ? this.needsOf(this.chosen) : []);
    this.drawing.draw(timeline, { width, longest, arrows,
      path: path && !problems.length ? criticalPath(timeline) : null,
      marks: { chosen: this.chosen, needs, unable: problems.slice(0, 1) } });
    this.part("svg").setAttribute("aria-label", `${this.part("h2").textContent}: timeline`);
    this.tell(this.spanOf(this.chosen));
  }

  /** The verdict of the proof, and the cost of the reader's changes. */
  verdict() {
    const { schedule, problems, before, refused, timeline } = this;
    if (refused) return refused;
    if (!schedule) return "choose a second schedule to compare with";
    if (this.choice === "measured") return page.measured.words;
    if (problems.length) return `${problems[0].text}\nThe outlined passes run without their data.`;
    if (before === null) return PROVED;
    const more = timeline.makespan - before;
    return `your order can run. The step takes ${number(timeline.makespan)}${this.unit}: `
      + (Math.abs(more) < 1e-9 * before ? "as long as before"
        : `${number(Math.abs(more))}${this.unit} ${more > 0 ? "more" : "less"} than before`);
  }

  spanOf(pass) { return this.timeline?.spans.flat().find(span => span.pass === pass) ?? null; }

  /** The passes that a pass depends on: its own forward or I, and its messages. */
  needsOf(pass) {
    const parts = pass.parts.flatMap(({ kind, stage, mb }) => [
      ...NEEDED[kind] ? [nameOf(NEEDED[kind], stage, mb)] : [],
      ...this.schedule.neighbours({ parts: [{ kind, stage, mb }] })[0].flatMap(
        ({ direction, from }) => direction === "F" ? [nameOf("F", from, mb)]
          : [nameOf("B", from, mb), nameOf("I", from, mb)])]);
    return this.schedule.programs.flat().filter(one => one.parts.some(part =>
      parts.includes(nameOf(part.kind, part.stage, part.mb))));
  }

  /** Describe a pass: what it is, when it runs, and why then. */
  tell(span) {
    this.part(".told").textContent = span ? this.about(span) : "";
  }

  about({ pass, rank, start, end, message, before, forced }) {
    const name = one => this.schedule.label(one), unit = this.unit;
    const mbs = pass.parts.map(({ stage, mb }) => `stage ${stage}, microbatch ${mb}`).join("; ");
    const idle = start - (before?.end ?? 0);
    const why = forced ? "It never gets its data."
      : message ? `The worker waits ${number(idle)}${unit} for ${name(message.from.pass)} of `
        + `worker ${message.from.rank}.`
      : before && !idle ? `It follows ${name(before.pass)}.` : "";
    return `${name(pass)}: ${WORDS[pass.kind]}, ${mbs}, on worker ${rank}, from `
      + `${number(start)} to ${number(end)}${unit}. ${why}`;
  }

  /** Move the pass at a place of a worker's program to another place. */
  move(from, to) {
    const programs = this.schedule.programs.map(program => [...program]);
    const [pass] = programs[from.rank].splice(from.index, 1);
    programs[to.rank].splice(to.index, 0, pass);
    if (from.rank === to.rank && from.index === to.index) return;
    this.history.push(this.schedule.programs);
    this.schedule = this.schedule.changed(programs);
    this.chosen = pass;
    this.changed();
  }

  undo() {
    if (!this.history.length) return;
    this.schedule = this.schedule.changed(this.history.pop());
    this.changed();
  }

  restore(programs) {
    this.schedule = this.schedule.changed(programs);
    this.history = [];
    this.changed();
  }

  save() {
    const { name, p, m } = this.schedule, link = element("a", "",
      { download: `${name.replace(/\.csv$/, "")}-p${p}-m${m}.csv` });
    link.href = URL.createObjectURL(new Blob([this.schedule.csv()], { type: "text/csv" }));
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

function titleOf(schedule, choice, changes) {
  const { name, p, stages, m } = schedule;
  return (choice === "measured" ? page.measured.title : name) + (changes ? ", your order" : "")
    + `: ${p} worker${p > 1 ? "s" : ""}, ${stages} stage${stages > 1 ? "s" : ""}, `
    + `${m} microbatch${m > 1 ? "es" : ""}`;
}

/** The timeline that a run measured; its messages are unknown. */
function measured(schedule) {
  const spans = page.measured.passes.map((own, rank) => {
    let before = null;
    return own.map(([start, end, text]) =>
      before = { pass: readPass(text), rank, start, end, before, message: null, forced: false });
  });
  return figures(schedule.changed(spans.map(own => own.map(span => span.pass))), spans, []);
}


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

// Reads the orders and the fields, and draws both panels, the figures and the workers.
const NAMES = { f: "F", i: "I", w: "W", hop: "hop" }, FIELDS = Object.keys(NAMES);

/** Decodes {"name p m chunks": programs, or why there are none}. */
async function readOrders() {
  const bytes = Uint8Array.from(atob(find("orders").textContent), one => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

/** What is wrong with the cost fields, or "". */
function mistake() {
  const wrong = FIELDS.filter(name => {
    const value = find(name).valueAsNumber;
    return !Number.isFinite(value) || value < 0 || value === 0 && name !== "hop";
  });
  return wrong.map(name => `${NAMES[name]} must be a number `
    + (name === "hop" ? "of at least 0" : "above 0")).join("; ");
}

/** Costs by stage, from the fields or from the stages of the run; see `simulate`. */
function costsOf(schedule) {
  const hop = find("hop").valueAsNumber, { overlap } = page.start, run = page.measured?.costs;
  if (find("by-stage").querySelector("input").checked && run?.f.length === schedule.stages)
    return { ...run, overlap, hop };
  const parts = find("share").value === "worker" ? schedule.stages / schedule.p : 1;
  const [f, i, w] = ["f", "i", "w"].map(name =>
    Array(schedule.stages).fill(find(name).valueAsNumber / parts));
  return { f, i, w, overlap, hop };
}

class Explorer {
  constructor(orders) {
    this.orders = orders;
    const names = Object.keys(page.families).map(name => [name, name]);
    const own = page.own ? [["own", page.own.title]] : [];
    const run = page.measured ? [["measured", page.measured.title]] : [];
    const draw = () => this.draw();
    this.panels = [new Panel("first", [...own, ...names], draw),
                   new Panel("second", [["", "none"], ...run, ...own, ...names], draw)];
    this.fill();
    for (const name of ["f", "i", "w"]) find(name).addEventListener("input", () => {
      find("by-stage").querySelector("input").checked = false;  // typed costs take precedence
    });
    for (const input of find("controls").querySelectorAll("input, select"))
      input.addEventListener("input", draw);
    const places = this.panels.map(panel => panel.part(".scroll"));
    for (const place of places) place.addEventListener("scroll", () => {
      for (const other of places) other.scrollLeft = place.scrollLeft;
    });
    let shown = find("controls").clientWidth;  // the width for which it is drawn
    this.draw();
    new ResizeObserver(() => {
      if (find("controls").clientWidth === shown) return;
      shown = find("controls").clientWidth;
      this.draw();
    }).observe(find("controls"));
  }

  /** Fill the fields with the values of the command line. */
  fill() {
    const { start } = page;
    for (const [id, counts, wanted] of [["p", page.ranks, start.p], ["m", page.microbatches,
      start.m]]) {
      find(id).append(...counts.map(count => element("option", count)));
      find(id).value = counts.filter(count => count <= wanted).at(-1);
    }
    for (const name of FIELDS) find(name).value = start[name];
    find("share").value = start.share;
    find("by-stage").hidden = !page.measured;
    find("by-stage").querySelector("input").checked = !!page.measured;
    [start.first, start.second].forEach((name, i) => {
      const panel = this.panels[i];
      panel.part(".choice").value = name;
      panel.chunkSelect.append(element("option", start.chunks));
    });
    const last = counts => counts[counts.length - 1];
    find("range").textContent = `This page has orders for up to ${last(page.ranks)} workers and `
      + `${last(page.microbatches)} microbatches. For more, use the command line: `
      + "mpipar schedule NAME --pp P --num-microbatches M --html FILE.";
  }

  draw() {
    find("mistake").textContent = mistake();
    find("mistake").hidden = !mistake();
    if (mistake()) return;
    const [p, m] = [+find("p").value, +find("m").value];
    for (const panel of this.panels) {
      panel.choose(this.orders, p, m);
      panel.compute(costsOf);
    }
    const longest = Math.max(...this.panels.map(({ timeline }) => timeline?.makespan ?? 0), 1e-300);
    for (const panel of this.panels)
      panel.draw({ zoom: find("zoom").valueAsNumber, longest, arrows: find("arrows").checked,
                   path: find("path").checked, unit: page.unit });
    const costs = FIELDS.map(name => `${NAMES[name]} ${find(name).value}`).join(", ");
    find("subtitle").textContent = find("by-stage").querySelector("input").checked
      ? `costs of each stage as measured, hop ${find("hop").value}`
      : `${costs} of ${find("share").value === "worker" ? "a worker's layers" : "each stage"}`;
    this.legend();
    this.figures();
    this.workers();
  }

  legend() {
    const shown = this.panels.flatMap(({ schedule }) => schedule?.programs.flat() ?? []);
    const kinds = new Set(shown.map(pass => pass.kind));
    const items = Object.keys(WORDS).filter(kind => kinds.has(kind)).map(kind => {
      const item = element("span", WORDS[kind]);
      item.prepend(swatch(kind === "OVERLAP_F_B" ? "opt" : kind));
      return item;
    });
    if (this.panels.some(({ schedule }) => schedule && schedule.stages > schedule.p))
      items.push(element("span", "paler: a worker's later stages"));
    const idle = element("span", "idle");
    idle.prepend(element("i", "", { class: "swatch hatched" }));
    find("legend").replaceChildren(...items, idle);
  }

  /** A table: its rows are figures, its columns the two schedules. */
  figures() {
    const shown = this.panels.filter(panel => panel.timeline);
    const rows = [["", ...shown.map(panel => panel.part("h2").textContent.split(":")[0])]];
    for (const [name, value] of FIGURES)
      rows.push([name, ...shown.map(panel => panel.problems.length ? "-" : value(panel))]);
    listed("figures", rows);
  }

  workers() {
    const rows = [["worker", "busy", "share", "idle", "peak stash", "messages"]];
    for (const { timeline, schedule } of this.panels.filter(({ timeline, problems }) =>
      timeline && !problems.length))
      timeline.busy.forEach((busy, rank) => rows.push([`${schedule.name} ${rank}`, number(busy),
        percent(busy / timeline.makespan), number(timeline.idle[rank]), timeline.peakStash[rank],
        timeline.sent[rank]]));
    listed("workers", rows);
  }
}

const sum = values => values.reduce((a, b) => a + b, 0);

/** One number, or the range over the workers. */
function spread(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)].map(number);
  return low === high ? low : `${low} to ${high}`;
}

/** The chain of passes and messages that determines when the step ends. */
function pathWords({ timeline, choice }) {
  if (choice === "measured") return "unknown";
  const path = criticalPath(timeline), hops = path.filter(span => span.message).length;
  return `${path.length} passes, ${hops} hop${hops === 1 ? "" : "s"}`;
}

const FIGURES = [
  ["step", ({ timeline, unit }) => number(timeline.makespan) + unit],
  ["bubble, share of the step", ({ timeline }) => `${(100 * timeline.bubbleShare).toFixed(1)} %`],
  ["bubble, idle time of a worker", ({ timeline }) => spread(timeline.idle)],
  ["peak stash, stage activations", ({ timeline }) => spread(timeline.peakStash)],
  ["peak stash, microbatches of a worker's layers", ({ timeline: { peakStash, schedule } }) =>
    number(Math.max(...peakStash) * schedule.p / schedule.stages)],
  ["messages of all workers", ({ timeline }) => number(sum(timeline.sent))],
  ["critical path", pathWords],
];

/** A table of rows of texts, column names first. */
function listed(id, [names, ...rows]) {
  fillTable(find(id), names.map((name, i) => [name, row => row[i]]), rows);
}

document.title = find("title").textContent = page.title;
theme();
let explorer = null;
const ready = readOrders().then(orders => { explorer = new Explorer(orders); });
