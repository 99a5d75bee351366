// The page: reads the orders and the fields, and draws both panels, the figures and the workers.
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
