// The data, what is chosen of it, and small helpers.

const DATA = JSON.parse(document.getElementById("data").textContent);
const ROWS = DATA.rows.task.map((_, at) => {
  const row = { at };
  for (const name in DATA.rows) row[name] = DATA.rows[name][at];
  return row;
});
const LABELS = [...new Set(ROWS.map((row) => row.label))];
const COLOURS = 7;

// An arm that is tuned to another's bytes has no budget, but comes out at one.
const budgetText = (row) => (row.budget == null && row.tuned == null ? "none" : row.budget_text);

// What can be filtered: how a row's value is told from others, and how it reads.
const FILTERS = {
  task: { title: "Task", of: (row) => row.task, text: (row) => row.task },
  protocol: { title: "Question", of: (row) => row.protocol ?? "", text: (row) => questionText(row) || "—" },
  budget: { title: "Budget", of: (row) => (row.budget == null ? "" : row.budget_text), text: (row) => row.budget_text },
  length: { title: "Length", of: (row) => row.length ?? "", text: (row) => lengthText(row.length) },
};

const state = {
  on: {}, // values that pass, by filter
  chosen: new Map(), // label -> slot of its colour and mark
  hideOthers: false,
};

function passes(row) {
  if (state.hideOthers && !state.chosen.has(row.label)) return false;
  return Object.keys(FILTERS).every((name) => state.on[name].has(FILTERS[name].of(row)));
}

function choose(label, yes) {
  if (!yes) return state.chosen.delete(label);
  const taken = new Set(state.chosen.values());
  let slot = 0;
  while (taken.has(slot)) slot += 1;
  state.chosen.set(label, slot);
}

function look(label) {
  const slot = state.chosen.get(label);
  if (slot === undefined) return { chosen: false, tint: "var(--others)", shape: 0, dash: "" };
  return {
    chosen: true,
    tint: `var(--c${slot % COLOURS})`,
    shape: slot % COLOURS,
    dash: ["", "5 3", "2 2"][Math.floor(slot / COLOURS) % 3],
  };
}

// Texts from the data only ever become text nodes.
function make(tag, attributes = {}, ...children) {
  const known = SVG.has(tag);
  const element = known
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}
const SVG = new Set(["svg", "g", "path", "line", "rect", "text", "title", "circle"]);

const bdi = (text) => make("bdi", { dir: "auto" }, text);
const number = (value, digits = 0) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (value, digits = 1) => `${number(100 * value, digits)}\u202f%`;
const range = (low, high, text) => `${text(low)}–${text(high)}`;
const lengthText = (length) =>
  length == null ? "—" : length >= 1024 && length % 1024 === 0 ? `${length / 1024}K` : number(length);
const questionText = (row) =>
  row.protocol === "inside" ? "question known" : row.protocol === "unknown" ? "question unknown" : row.protocol ?? "";
const mebibytes = (bytes) => {
  const value = bytes / 2 ** 20;
  return `${number(value, value >= 100 ? 0 : value >= 1 ? 1 : 3)} MiB`;
};

function conditionText(row, ...names) {
  const parts = {
    task: row.task,
    protocol: questionText(row),
    length: row.length == null ? "" : `${lengthText(row.length)} tokens`,
  };
  return names.map((name) => parts[name]).filter(Boolean).join(", ");
}

function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) {
    const name = key(item);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(item);
  }
  return groups;
}

const distinct = (items, of) => new Set(items.map(of)).size;

function nText(rows) {
  const counts = rows.map((row) => row.n);
  const low = Math.min(...counts), high = Math.max(...counts);
  return `n = ${low === high ? number(low) : range(low, high, number)}`;
}
