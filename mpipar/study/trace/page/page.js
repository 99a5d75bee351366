// Everything around the timeline: figures, findings, tables of words, the toolbar.
const WORDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
                sync: "gradient sums and norm", opt: "optimizer", data: "data loading",
                eval: "evaluation", save: "checkpoint save", gc: "garbage collection",
                wait: "waits for a late rank", transfer: "transfer" };

function head() {
  document.title = page.title;
  find("title").textContent = page.title;
  find("subtitle").textContent = [page.model, page.state, page.clock && `clock: ${page.clock}`]
    .filter(Boolean).join(" \u00b7 ");
  const remarks = page.remarks ?? [];
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

/** A table of words: with a head, or names with their values. */
function tableCard({ title, words, head, rows }) {
  const card = element("section", "", { class: head ? "card wide" : "card" });
  const scroll = element("div", "", { class: "scroll" }), table = element("table");
  card.append(element("h2", title), scroll);
  if (words) card.firstChild.append(element("small", words, { class: "soft" }));
  scroll.append(table);
  if (head) fillTable(table, head.map((name, i) => [name, row => row[i]]), rows);
  else for (const row of rows) {
    const line = table.insertRow();
    row.forEach((text, i) => line.append(element("td", text, { class: i ? "text" : "name" })));
  }
  return card;
}

/** The layout stays open; what every run has alike is folded. */
function tables() {
  const settings = find("settings").lastElementChild;
  for (const one of page.tables ?? [])
    (one.head ? find("tables") : settings).append(tableCard(one));
  find("settings").hidden = !page.tables;
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
}
