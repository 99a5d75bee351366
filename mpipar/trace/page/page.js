// Everything around the timeline: figures, tables, loss curve, pipeline, layout.
const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
                sync: "gradient sums and norm", opt: "optimizer", data: "data loading",
                eval: "evaluation", save: "checkpoint save", gc: "garbage collection",
                wait: "waits for a late rank", transfer: "transfer" };
const CATEGORY_COLOURS = { forward: "F", backward: "B", optimizer: "opt", data: "data",
                           bubble: "bubble", waiting: "wait", transfer: "transfer",
                           other: "other" };

function head() {
  document.title = page.title;
  find("title").textContent = page.title;
  find("subtitle").textContent = [page.model, page.state, page.clock && `clock: ${page.clock}`]
    .filter(Boolean).join(" \u00b7 ");
  const remarks = [page.thinned, ...page.remarks ?? []].filter(Boolean);
  find("remarks").hidden = !remarks.length;
  for (const text of remarks) find("remarks").append(element("p", text));
}

/** A row of figures, with a bar for those that are shares. */
function cards(place, rows) {
  for (const [name, value, words, share] of rows) {
    const card = element("div", "", { class: "stat" });
    card.append(element("span", name, { class: "name" }), element("b", value));
    if (share !== undefined) {
      const meter = element("div", "", { class: "meter" });
      meter.append(element("i", "", { style: `width:${share * 100}%` }));
      card.append(meter);
    }
    card.append(element("span", words, { class: "soft" }));
    find(place).append(card);
  }
}

function findings() {
  find("findings").hidden = !page.findings.length;
  for (const finding of page.findings) {
    const item = element("li");
    item.append(element("b", finding.kind),
      ` (about ${short(finding.lost_ms)} ms per step): ${finding.text}`);
    find("findings").lastElementChild.append(item);
  }
}

/** Tables of words: the layout with a head, and names with their values. */
function tables() {
  for (const { title, words, head, rows } of page.tables ?? []) {
    const card = element("section", "", { class: head ? "card wide" : "card" });
    const scroll = element("div", "", { class: "scroll" }), table = element("table");
    card.append(element("h2", title), scroll);
    if (words) card.firstChild.append(element("small", words, { class: "soft" }));
    scroll.append(table);
    if (head) {
      const line = table.createTHead().insertRow();
      for (const name of head) line.append(element("th", name, { class: "text" }));
    }
    const body = table.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      row.forEach((text, i) => line.append(
        element("td", text, { class: head || i ? "text" : "text name" })));
    }
    find("tables").append(card);
  }
  find("log").hidden = !page.log;
  find("log").querySelector("pre").textContent = page.log ?? "";
}

const LANES = { spans: "passes", operations: "operations of layers", calls: "barriers" };

function toolbar(timeline) {
  const lanes = timeline.lanes.map(lane => LANES[lane]);
  find("lanes").textContent = `lanes of a rank: ${lanes.join(", ")}`;
  const steps = [["all steps", ...timeline.limits],
    ...page.timeline.steps.map(([step, start, end]) => [`step ${step}`, start, end])];
  for (const [name] of steps) find("steps").append(element("option", name));
  find("steps").onchange = event => timeline.show(...steps[event.target.selectedIndex].slice(1));
  for (const axis of page.timeline.axes) {
    const button = element("button", ` ${axis}`,
      { type: "button", class: "chip", "aria-pressed": "true", title: `show barriers of ${axis}` });
    button.prepend(swatch(`axis-${axis}`));
    button.onclick = () => {
      const hide = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!hide));
      timeline.hidden[hide ? "add" : "delete"](axis);
      timeline.draw();
    };
    find("axes").append(button);
  }
  const used = new Set(page.timeline.ranks.flatMap(rank => ["spans", "operations"].flatMap(
    lane => rank[lane].map(row => timeline.kind(row, lane)))));
  if (timeline.lanes.includes("calls")) used.add("wait").add("transfer");
  for (const kind of Object.keys(WORDS).filter(one => used.has(one))) {
    const item = element("span", WORDS[kind]);
    item.prepend(swatch(kind));
    find("legend").append(item);
  }
  find("focus").onclick = () => focus(timeline, null);
}

/** Show only one barrier in the timeline, or all again. */
function focus(timeline, row) {
  timeline.focus = row && { axis: row.axis, name: row.name, operation: row.operation };
  find("focus").hidden = !row;
  find("focus").textContent = row ? `only ${row.axis} ${row.name} \u00d7` : "";
  for (const line of document.querySelectorAll("#barriers tbody tr"))
    line.classList.toggle("chosen", line.row === row);
  timeline.draw();
}

function causes() {
  const table = find("causes"), widest = Math.max(...page.causes.map(row => row.ms), 1e-9);
  if (!page.causes.length) return table.append(element("caption", "nobody waited"));
  const line = element("tr");
  for (const name of ["cause", "ms", "share", "mostly waiting", "at"])
    line.append(element("th", name, { class: name === "cause" || name === "at" ? "text" : "" }));
  table.append(element("thead"), element("tbody"));
  table.tHead.append(line);
  for (const row of page.causes) {
    const made = element("tr"), ms = element("td");
    const bar = element("i", "", { class: "bar", style: `width:${120 * row.ms / widest}px` });
    ms.append(bar, short(row.ms));
    made.append(element("td", row.text, { class: "text" }), ms, element("td", percent(row.share)),
      element("td", `rank ${row.rank}`), element("td", row.barrier, { class: "text" }));
    table.tBodies[0].append(made);
  }
}

const COLUMNS = [
  ["axis", "axis", row => row.axis], ["barrier", "name", row => row.name],
  ["operation", "operation", row => row.operation],
  ["calls", "calls", row => `${+row.calls.toFixed(2)}`],
  ["bytes", "bytes", row => bytes(row.bytes)], ["sent", "sent", row => bytes(row.sent)],
  ["wait ms", "wait_ms", row => row.wait_ms.toFixed(2)],
  ["transfer ms", "transfer_ms", row => row.transfer_ms.toFixed(2)],
  ["longest wait ms", "longest_ms", row => row.longest_ms.toFixed(2)],
  ["mostly last", "last", row => row.last < 0 ? "" : `rank ${row.last} (${row.times} of `
    + `${row.events})`],
  ["source", "source", row => row.source],
];
const TEXT = new Set(["axis", "name", "operation", "source"]);

/** What a click does, the keyboard does too. */
function onPress(target, act) {
  target.tabIndex = 0;
  target.onclick = act;
  target.onkeydown = event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();  // a space would scroll
    act();
  };
}

function barriers(timeline) {
  const table = find("barriers"), line = element("tr");
  table.append(element("thead"), element("tbody"));
  table.tHead.append(line);
  for (const [name, key] of COLUMNS) {
    const cell = element("th", name, { scope: "col", "data-key": key,
                                       class: TEXT.has(key) ? "text" : "" });
    onPress(cell, () => {
      const down = cell.getAttribute("aria-sort") !== "descending" && !TEXT.has(key)
        || cell.getAttribute("aria-sort") === "ascending";
      for (const other of line.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      const rows = [...table.tBodies[0].rows].sort((a, b) => sign * (TEXT.has(key)
        ? String(a.row[key]).localeCompare(b.row[key], "en", { numeric: true })
        : a.row[key] - b.row[key]));
      table.tBodies[0].append(...rows);
    });
    line.append(cell);
  }
  for (const row of page.barriers) {
    const made = element("tr");
    made.row = row;
    for (const [, key, show] of COLUMNS) {
      const cell = element("td", "", { class: TEXT.has(key) ? "text" : "" });
      if (key === "axis") cell.append(swatch(`axis-${row.axis}`), ` ${row.axis}`);
      else cell.append(key === "source" ? element("code", show(row)) : show(row));
      made.append(cell);
    }
    onPress(made, () => focus(timeline, made.classList.contains("chosen") ? null : row));
    table.tBodies[0].append(made);
  }
}
