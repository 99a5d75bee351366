// Loss curve, pipeline and layout, as SVG and boxes; colours come from the style sheet.
const SIDE = 48;

/** Round values that divide [low, high] into a few parts. */
function ticks(low, high, count = 5) {
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span / count));
  const step = power * [1, 2, 5, 10].find(factor => span / (power * factor) <= count);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9 * span; value += step)
    found.push(+value.toPrecision(10));
  return found;
}

function loss() {
  const section = find("loss"), points = page.loss;
  if (!points.length) return section.append(element("p", "the run has no metrics.jsonl"));
  const width = 520, height = 260, values = points.map(([, value]) => value);
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const low = Math.min(...values), high = Math.max(...values);
  const x = step => SIDE + (step - first) / Math.max(last - first, 1) * (width - SIDE - 12);
  const y = value => 12 + (high - value) / Math.max(high - low, 1e-9) * (height - 44);
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
                               "aria-label": "loss by step" });
  for (const value of ticks(low, high)) {
    svg.append(drawing("line", { x1: SIDE, x2: width - 12, y1: y(value), y2: y(value),
                                 stroke: "var(--line)" }),
      drawing("text", { x: SIDE - 6, y: y(value) + 4, "text-anchor": "end" }, value));
  }
  for (const step of ticks(first, last))
    if (Number.isInteger(step)) svg.append(
      drawing("text", { x: x(step), y: height - 8, "text-anchor": "middle" }, step));
  const traced = page.timeline.steps.map(([step]) => step);
  svg.append(drawing("rect", { x: x(Math.min(...traced)) - 1.5, y: 12, fill: "var(--accent)",
    width: Math.max(x(Math.max(...traced)) - x(Math.min(...traced)), 0) + 3, height: height - 44,
    opacity: 0.25 }));
  const path = points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} `
    + y(value).toFixed(1)).join("");
  svg.append(drawing("path", { d: path, fill: "none", stroke: "var(--F)", "stroke-width": 2 }));
  const dot = drawing("circle", { r: 4, fill: "var(--F)", visibility: "hidden" });
  svg.append(dot);
  const note = element("p", `${points.length} steps; the band marks the traced ones`,
                       { class: "soft" });
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * width;
    const nearest = points.reduce((a, b) => Math.abs(x(a[0]) - at) <= Math.abs(x(b[0]) - at)
      ? a : b);
    dot.setAttribute("cx", x(nearest[0]));
    dot.setAttribute("cy", y(nearest[1]));
    dot.setAttribute("visibility", "visible");
    note.textContent = `step ${nearest[0]}: loss ${nearest[1].toFixed(4)}`;
  });
  section.append(svg, note);
}

/** Passes of every pipeline rank, one block of rows measured and one simulated, to one scale. */
function pipeline() {
  const section = find("pipeline"), data = page.pipeline;
  section.hidden = !data;  // one pipeline rank has no bubble
  if (!data) return;
  const width = 760, count = data.measured.length;
  const row = Math.max(18, Math.min(40, Math.floor(150 / count)));
  const end = Math.max(...[...data.measured, ...data.simulated].flat().map(span => span[1]));
  const scale = (width - SIDE - 170) / end;
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${2 * count * row + 70}`, role: "img",
                               "aria-label": "passes measured and simulated" });
  [["measured", `measured, step ${data.step}`, "busy", "bubble_ms"],
   ["simulated", `simulated from these passes, instant messages`, "busy_simulated",
    "bubble_simulated_ms"]].forEach(([key, title, busy, bubble], part) => {
    const above = 18 + part * (count * row + 32);
    svg.append(drawing("text", { x: 0, y: above - 5, "font-weight": 600 }, title));
    data[key].forEach((spans, rank) => {
      const top = above + rank * row + 3;
      const middle = top + (row - 4) / 2 + 4;
      svg.append(drawing("text", { x: 0, y: middle }, `pp${rank}`),
        drawing("rect", { x: SIDE, y: top, width: end * scale, height: row - 4,
                          fill: "var(--row)" }),
        drawing("text", { x: SIDE + end * scale + 8, y: middle },
          `busy ${percent(data.rows[rank][busy])}, bubble ${short(data.rows[rank][bubble])} ms`));
      for (const [start, stop, kind, stage, mb] of spans) {
        const box = drawing("rect", { x: SIDE + start * scale, y: top, rx: 2, height: row - 4,
          width: Math.max((stop - start) * scale - 0.6, 0.5),
          fill: `var(--${kind.length > 1 ? "B" : kind})` });
        box.append(drawing("title", {}, `stage ${stage} ${kind}, microbatch ${mb}: `
          + milliseconds(stop - start)));
        svg.append(box);
        if (row > 21 && (stop - start) * scale > 22) {
          const pass = kind.length > 1 ? "FB" : kind;
          const label = drawing("text", { x: SIDE + (start + stop) / 2 * scale, y: middle,
            "text-anchor": "middle", "pointer-events": "none" }, pass + mb);
          label.style.fill = "var(--on-bar)";
          svg.append(label);
        }
      }
    });
  });
  const note = `0 to ${milliseconds(end)}; all blocked time inside a pass counts as the pass`;
  section.append(svg, element("p", note, { class: "soft" }));
}

/** A box per rank: columns are pipeline ranks, rows everything else. */
function layout() {
  const map = find("map"), columns = page.sizes.pp;
  for (const name of page.categories) {
    const item = element("span", name);
    item.prepend(swatch(CATEGORY_COLOURS[name]));
    find("categories").append(item);
  }
  map.style.gridTemplateColumns = `repeat(${columns}, minmax(170px, 1fr))`;
  for (let pp = 0; pp < columns; pp++)
    map.append(element("div", `pipeline rank ${pp}`, { class: "maphead" }));
  const key = rank => page.order.filter(axis => axis !== "pp").map(axis => rank.coordinates[axis]);
  const ordered = [...page.ranks].sort((a, b) => {
    const [left, right] = [key(a), key(b)];
    const differs = left.findIndex((value, i) => value !== right[i]);
    return differs < 0 ? a.coordinates.pp - b.coordinates.pp : left[differs] - right[differs];
  });
  for (const rank of ordered) {
    const box = element("div", "", { class: "rank" }), stack = element("div", "",
      { class: "stack" });
    const total = rank.ms.reduce((a, b) => a + b, 0), told = [];
    rank.ms.forEach((ms, i) => {
      const name = page.categories[i];
      if (ms / total < 0.002) return;
      told.push(`${name} ${short(ms)} ms`);
      stack.append(element("i", "", { title: `${name}: ${short(ms)} ms, ${percent(ms / total)}`,
        style: `width:${100 * ms / total}%;background:var(--${CATEGORY_COLOURS[name]})` }));
    });
    box.append(element("b", `rank ${rank.rank} `), element("span", `${rank.place} on ${rank.host}`,
      { class: "soft" }), element("div", `stage ${rank.stages.join("; ")}`), stack,
      element("div", told.join(" \u00b7 "), { class: "soft told" }));
    map.append(box);
  }
}

head();
const timeline = new Timeline(page.timeline, page.ranks.map(rank => rank.place));
toolbar(timeline);
causes();
barriers(timeline);
theme(timeline);
loss();
pipeline();
layout();
