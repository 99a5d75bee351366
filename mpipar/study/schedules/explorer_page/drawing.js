// A timeline as SVG: a row for each worker, a box for each pass, hatched idle time, and arrows.
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
