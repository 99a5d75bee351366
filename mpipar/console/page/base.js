// What every page has: its data, elements, numbers for people, and the choice of a theme.
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

/** The button of the theme. recolour: draws again what does not follow the style sheet. */
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
