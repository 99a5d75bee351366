// Shared by all pages: data, elements, numbers, sortable tables, and the choice of a theme.
const page = JSON.parse(document.getElementById("data").textContent);
const find = id => document.getElementById(id);

function element(tag, text = "", attributes = {}) {
  const made = Object.assign(document.createElement(tag), { textContent: text });
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function drawing(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

function swatch(name) {
  const made = element("i", "", { class: "swatch" });
  made.style.background = `var(--${name})`;
  return made;
}

const percent = share => `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
const short = number => number >= 100 ? number.toFixed(0) : number >= 1 ? number.toFixed(1)
  : number.toFixed(2);

/** Round values that divide [low, high] into a few parts. */
function ticks(low, high, count = 5) {
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span / count));
  const step = power * [1, 2, 5, 10].find(factor => span / (power * factor) <= count);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9 * span; value += step)
    found.push(+value.toPrecision(10));
  return found;
}

/** Let the keyboard do what a click does. */
function onPress(target, act) {
  target.tabIndex = 0;
  target.onclick = act;
  target.onkeydown = event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();  // a space would scroll
    act();
  };
}

/** The value of a text such as `1,024 KiB`; NaN for other texts. */
function amount(text) {
  const [, digits, unit] = /^([\d,.]+) ?([kKMG]?)/.exec(text) ?? [];
  return digits ? +digits.replaceAll(",", "") * ({ k: 1e3, K: 1e3, M: 1e6, G: 1e9 }[unit] ?? 1)
    : NaN;
}

function compare(one, other) {
  if (typeof one === "number") return one - other;
  return amount(one) - amount(other) || one.localeCompare(other, "en", { numeric: true });
}

/** Fill a table that can be sorted by clicking a column's name. columns: [name, value of a row,
    content of its cell: text or an element]. */
function fillTable(table, columns, rows) {
  const head = element("tr"), lines = rows.map(row => Object.assign(element("tr"), { row }));
  for (const [name, value, show = value] of columns) {
    const isText = rows.some(row => typeof value(row) === "string");
    const title = element("th", name, { scope: "col", class: isText ? "text" : "" });
    onPress(title, () => {
      const before = title.getAttribute("aria-sort");
      const down = before === "ascending" || !before && !isText;
      for (const other of head.cells) other.removeAttribute("aria-sort");
      title.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...lines.sort((a, b) => (down ? -1 : 1)
        * compare(value(a.row), value(b.row))));
    });
    head.append(title);
    for (const line of lines) {
      const cell = element("td", "", { class: isText ? "text" : "" });
      cell.append(...[show(line.row)].flat());
      line.append(cell);
    }
  }
  table.replaceChildren(element("thead"), element("tbody"));
  table.tHead.append(head);
  table.tBodies[0].append(...lines);
}

/** The theme button. recolour: redraws what does not follow the style sheet. */
function theme(recolour = () => {}) {
  const names = ["system", "light", "dark"], root = document.documentElement;
  const use = name => {
    if (name === "system") delete root.dataset.theme;
    else root.dataset.theme = name;
    recolour();
  };
  let chosen = "system";
  find("theme").onclick = () => {
    chosen = names[(names.indexOf(chosen) + 1) % names.length];
    find("theme").textContent = `theme: ${chosen}`;
    use(chosen);
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  addEventListener("beforeprint", () => use("light"));  // paper is white
  addEventListener("afterprint", () => use(chosen));
}
