// Filters, the list of policies, and drawing all of it again when something changes.

function values(name) {
  const { of, text } = FILTERS[name];
  const found = new Map(ROWS.map((row) => [of(row), row]));
  const order = (row) => (typeof row[name] === "number" ? [row.budget_text.endsWith("rows") && name === "budget", row[name]] : [-1, 0]);
  const rows = [...found];
  if (name === "budget" || name === "length")
    rows.sort(([, a], [, b]) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1]);
  return rows.map(([value, row]) => [value, row[name] == null ? "none" : text(row)]);
}

function filterControls() {
  return Object.keys(FILTERS).map((name) => {
    const all = values(name);
    state.on[name] = new Set(all.map(([value]) => value));
    if (all.length < 2) return null;
    const chips = all.map(([value, text]) => chip({
      type: "checkbox", name, checked: true, text,
      change: (event) => {
        if (event.target.checked) state.on[name].add(value);
        else state.on[name].delete(value);
        draw();
      },
    }));
    return make("fieldset", { "data-filter": name }, make("legend", {}, FILTERS[name].title), make("div", { class: "chips" }, ...chips));
  });
}

function policyControls() {
  if (LABELS.length < 2) return null;
  const buttons = LABELS.map((label, s) => make(
    "button", {
      type: "button", "data-s": s, title: label, onclick: () => toggle(label),
      onpointerenter: () => heatUp(s), onpointerleave: () => heatUp(null), onfocus: () => heatUp(s), onblur: () => heatUp(null),
    },
    make("span"), bdi(label),
  ));
  const others = [[false, "others grey"], [true, "others hidden"]].map(([hide, text]) => chip({
    type: "radio", name: "others", checked: !hide, text, change: () => { state.hideOthers = hide; draw(); },
  }));
  return make(
    "fieldset", { id: "policies" }, make("legend", {}, "Policies: choose to see in colour"),
    make("div", { class: "chips" }, ...others),
    make("div", { class: "policies", style: { "margin-top": "6px" } }, ...buttons),
    make("div", { class: "actions" },
      make("button", { type: "button", class: "quiet", onclick: () => { state.chosen.clear(); draw(); } }, "Choose none"),
      make("button", { type: "button", class: "quiet", id: "reset", onclick: reset }, "Reset all")),
  );
}

function toggle(label) {
  choose(label, !state.chosen.has(label));
  draw();
}

function chooseDefaults() {
  state.chosen.clear();
  const known = ["zoomr", "sekv", "beacon_kv", "full"];
  const first = LABELS.length <= COLOURS ? LABELS
    : known.map((policy) => ROWS.find((row) => row.policy === policy)?.label).filter(Boolean);
  for (const label of first.length ? first : LABELS.slice(0, 4)) choose(label, true);
}

function reset() {
  for (const input of document.querySelectorAll("#controls input[type=checkbox]")) input.checked = true;
  for (const name of Object.keys(FILTERS)) state.on[name] = new Set(values(name).map(([value]) => value));
  state.hideOthers = false;
  document.querySelector("input[name=others]").checked = true;
  chooseDefaults();
  draw();
}

function draw() {
  const rows = ROWS.filter(passes);
  const main = document.getElementById("figures");
  const width = main.clientWidth;
  hideTip();
  const held = document.activeElement?.dataset?.text && [document.activeElement.name, document.activeElement.dataset.text];
  for (const [name, figure] of Object.entries(FIGURES)) {
    const section = document.getElementById(`figure-${name}`);
    const found = figure(rows, width);
    section.hidden = !found;
    section.replaceChildren(...(found ? [
      make("h2", {}, found.title), make("p", { class: "deck" }, found.deck), ...found.parts, make("p", { class: "note" }, found.note),
    ] : []));
  }
  // A picker that was clicked was drawn anew: the keyboard stays on it.
  if (held && !document.activeElement?.dataset?.text)
    [...document.querySelectorAll("[data-text]")].find((input) => input.name === held[0] && input.dataset.text === held[1])?.focus({ preventScroll: true });
  for (const button of document.querySelectorAll(".policies button")) {
    const label = LABELS[button.dataset.s];
    button.setAttribute("aria-pressed", state.chosen.has(label));
    button.firstChild.replaceChildren(swatch(label));
  }
  drawTable(rows);
  const answers = rows.reduce((sum, row) => sum + row.n, 0);
  document.getElementById("shown").textContent = rows.length
    ? `${number(rows.length)} of ${number(ROWS.length)} rows, ${number(answers)} answers` : "Nothing passes these filters.";
}

function heading() {
  const plural = (count, one, many) => `${number(count)} ${count === 1 ? one : many}`;
  const tasks = distinct(ROWS, (row) => row.task);
  const answers = ROWS.reduce((sum, row) => sum + row.n, 0);
  const subject = LABELS.length === 1 ? LABELS[0] : plural(LABELS.length, "cache policy", "cache policies");
  document.title = `ZoomKV report: ${DATA.model}`;
  document.getElementById("title").append(bdi(subject), " on ", bdi(DATA.model));
  const budgets = values("budget").map(([, text]) => text).filter((text) => text !== "none");
  document.getElementById("deck").textContent =
    `${plural(answers, "answer", "answers")} to ${plural(tasks, "task", "tasks")}`
    + `${budgets.length ? `, at ${budgets.length === 1 ? "a budget" : "budgets"} of ${budgets.join(", ")} (a share of the full cache's bytes, or rows)` : ""}. `
    + "Every point is one row of the table; n and 95 % intervals are given with each.";
  const notices = document.getElementById("notices");
  for (const check of DATA.checks.filter((check) => !check.ok))
    notices.append(make("p", { class: "notice" }, make("strong", {}, "Failed check: "), bdi(`${check.policy}, ${check.what}`), check.detail ? ` (${check.detail})` : "", ". Its numbers can't be trusted."));
  for (const warning of DATA.warnings) notices.append(make("p", { class: "notice" }, bdi(warning)));
}

function folded(title, content) {
  return make("details", {}, make("summary", {}, title), content);
}

function about() {
  const facts = [
    ["Model", bdi(DATA.model)],
    ["Fingerprint", make("code", {}, JSON.stringify(DATA.fingerprint))],
    ["Report", `zoomkv ${DATA.zoomkv}, format ${DATA.format}`],
    ["Command", make("pre", { dir: "auto" }, DATA.command)],
    ...DATA.sources.flatMap((source) => [
      ["Results", bdi(`${source.file}: ${number(source.answers)} answers, zoomkv ${source.zoomkv}`)],
      ["Settings", folded("show", make("pre", { dir: "auto" }, JSON.stringify(source.settings, null, 1)))],
    ]),
  ];
  if (DATA.checks.length) {
    const passed = DATA.checks.filter((check) => check.ok).length;
    facts.push(["Checks", folded(`${passed} of ${DATA.checks.length} passed`, make("ul", { class: "checks" }, ...DATA.checks.map((check) =>
      make("li", {}, `${check.ok ? "✓ passed" : "✗ failed"}: `, bdi(`${check.policy}, ${check.what}`), check.detail ? ` (${check.detail})` : ""))))]);
  }
  const list = make("dl");
  for (const [name, content] of facts) list.append(make("dt", {}, name), make("dd", {}, content));
  document.getElementById("about").append(make("h2", {}, "How this was made"), list);
}

function themeButton() {
  const button = document.getElementById("theme");
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  system.addEventListener("change", label);
  label();
}

function start() {
  document.getElementById("controls").append(
    ...filterControls().filter(Boolean), ...[policyControls()].filter(Boolean), make("p", { id: "shown", role: "status" }),
  );
  const aside = document.querySelector("aside");
  aside.hidden = !aside.querySelector("fieldset");
  if (matchMedia("(max-width: 899px)").matches) document.getElementById("filters").open = false;
  const main = document.getElementById("figures");
  main.append(...Object.keys(FIGURES).map((name) => make("section", { class: "figure", id: `figure-${name}` })), tableSection());
  heading();
  about();
  themeButton();
  chooseDefaults();
  draw();
  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth === width) return;
    width = main.clientWidth;
    requestAnimationFrame(draw);
  }).observe(main);
}

start();
