// Curves of the run as SVG, and the start of the page; colours come from the style sheet.
const MARGIN = { left: 56, right: 14, top: 12, bottom: 26 };

/** A card with values by step; it shows the values of the step nearest to the pointer. */
function curve({ title, unit, series }, first) {
  const section = element("section", "", { class: first ? "card first" : "card" });
  const place = element("div"), note = element("p", "", { class: "legend" });
  section.append(element("h2", title), place, note);
  section.firstChild.append(element("small", unit, { class: "soft" }));
  let shown = 0;  // the width for which it is drawn: letters keep their size
  new ResizeObserver(() => {
    if (place.clientWidth === shown) return;
    shown = place.clientWidth;
    place.replaceChildren(curveDrawing(title, series, shown, first ? 300 : 190, note));
  }).observe(place);
  return section;
}

function curveDrawing(title, series, width, height, note) {
  const points = series.flatMap(one => one.points);
  const steps = points.map(point => point[0]), values = points.map(point => point[1]);
  const [from, to] = [least(steps), -least(steps.map(step => -step))];
  const [low, high] = [least(values), -least(values.map(value => -value))];
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const x = step => MARGIN.left + (step - from) / Math.max(to - from, 1) * (right - MARGIN.left);
  const y = value => high === low ? (MARGIN.top + bottom) / 2
    : MARGIN.top + (high - value) / (high - low) * (bottom - MARGIN.top);
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
                               "aria-label": `${title} by step` });
  for (const value of ticks(low, high)) {
    svg.append(drawing("line", { x1: MARGIN.left, x2: right, y1: y(value), y2: y(value),
                                 stroke: "var(--line)" }),
      drawing("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" },
              compact(value)));
  }
  for (const step of ticks(from, to, Math.max(2, Math.min(10, Math.floor(width / 90)))))
    if (Number.isInteger(step)) svg.append(
      drawing("text", { x: x(step), y: height - 8, "text-anchor": "middle" }, compact(step)));
  if (page.timeline) {
    const traced = page.timeline.steps.map(([step]) => step);
    const [start, end] = [traced[0], traced[traced.length - 1]];
    svg.append(drawing("rect", { x: x(start) - 1.5, y: MARGIN.top, fill: "var(--accent)",
      width: Math.max(x(end) - x(start), 0) + 3, height: bottom - MARGIN.top, opacity: 0.25 }));
  }
  const dots = series.map((one, i) => {
    const path = one.points.map(([step, value], n) => `${n ? "L" : "M"}${x(step).toFixed(1)} `
      + y(value).toFixed(1)).join("");
    svg.append(drawing("path", { d: path, fill: "none", stroke: `var(--${one.colour})`,
      "stroke-width": 2, "stroke-linejoin": "round" }));
    if (one.points.length === 1 || i && one.points.length <= 60)  // few, each measured separately
      svg.append(...one.points.map(([step, value]) => drawing("circle", { cx: x(step),
        cy: y(value), r: 3, fill: `var(--${one.colour})` })));
    return drawing("circle", { r: 4, fill: `var(--${one.colour})`, visibility: "hidden" });
  });
  svg.append(...dots);
  const tell = at => note.replaceChildren(...series.map((one, i) => {
    const [step, value] = at === undefined ? one.points[one.points.length - 1]
      : one.points.reduce((a, b) => Math.abs(x(a[0]) - at) <= Math.abs(x(b[0]) - at) ? a : b);
    const item = element("span", `${one.name} ${compact(value, 5)} at step ${step}`);
    item.prepend(swatch(one.colour));
    dots[i].setAttribute("cx", x(step));
    dots[i].setAttribute("cy", y(value));
    dots[i].setAttribute("visibility", at === undefined ? "hidden" : "visible");
    return item;
  }));
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    tell((event.clientX - box.left) / box.width * width);
  });
  svg.addEventListener("pointerleave", () => tell());
  tell();
  return svg;
}

const least = values => values.reduce((a, b) => Math.min(a, b));

/** A number in short form: 12.3k, 0.0003, 4.56. */
function compact(value, digits = 4) {
  const size = Math.abs(value);
  for (const [unit, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e4]])
    if (size >= factor) return `${+(value / (unit === "k" ? 1e3 : factor)).toPrecision(digits)}`
      + unit;
  return size && size < 1e-3 ? (+value.toPrecision(digits)).toExponential()
    : `${+value.toPrecision(digits)}`;
}

function curves() {
  find("curves").append(...page.curves.map((one, i) => curve(one, !i)));
  if (page.timeline && page.curves.length)
    find("curves").append(element("p", "the bands mark the traced steps", { class: "soft first" }));
}

head();
cards("summary", page.summary ?? []);
curves();
let timeline = null;
find("traced").hidden = !page.timeline;
if (page.timeline) {
  cards("cards", [["step", `${short(page.step_ms)} ms`, "mean of the traced steps"],
    ...page.efficiency.map(([name, value, words]) => [name, percent(value), words, value])]);
  findings();
  timeline = new Timeline(page.timeline, page.ranks);
  toolbar(timeline);
  find("barriers").append(tableCard({ title: "Barriers of a step",
    words: "ms, summed over ranks; last: the rank that came last, and how often",
    head: page.barriers[0], rows: page.barriers.slice(1) }));
}
theme(() => timeline?.recolour());
tables();
