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
