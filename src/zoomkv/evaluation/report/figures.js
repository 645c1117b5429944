// What is drawn. A figure takes the rows that pass the filters and gives its parts, or null when
// there is nothing to draw.

const picked = {}; // by figure and picker: the option that is on

function rowTip(row) {
  return () => [
    row.label,
    ["task", conditionText(row, "task", "protocol")],
    ["length", row.length == null ? null : lengthText(row.length)],
    ["budget", budgetText(row)],
    row.right == null
      ? ["likeliest token", `${percent(row.score)} agree`]
      : ["right", `${percent(row.right)} (${range(row.right_low, row.right_high, (value) => number(100 * value, 1))})`],
    ["n", number(row.n)],
    ["peak", row.held == null ? null : `${percent(row.held)} of full`],
    ["device, mean", mebibytes(row.device_bytes_mean)],
    ["speed", row.tokens_per_second == null ? null : `${number(row.tokens_per_second, 1)} tokens/s`],
  ];
}

function seriesOf(rows, point, extra = {}) {
  return [...groupBy(rows, (row) => row.label)].map(([name, own]) => ({
    name, s: LABELS.indexOf(name), look: look(name), ...extra,
    points: own.map((row) => ({ ...point(row), tip: rowTip(row) }))
      .filter((each) => each.x != null && each.y != null).sort((a, b) => a.x - b.x),
  })).filter((each) => each.points.length);
}

const SHARE = { domain: [0, 1], ticks: [0, 0.25, 0.5, 0.75, 1], text: (value) => `${number(100 * value)}\u202f%` };
const shortPercent = (value) => `${Number((100 * value).toPrecision(2))}\u202f%`;

function logAxis(values, text, pad = 1.12, ticks = null) {
  const low = Math.min(...values), high = Math.max(...values);
  const domain = [low / pad, high * pad];
  return { log: true, domain, ticks: ticks ?? logTicks(domain), text };
}

function picker(figure, name, title, options) {
  const key = `${figure}:${name}`;
  if (!options.some(([value]) => value === picked[key])) picked[key] = options[0]?.[0];
  if (options.length < 2) return null;
  const pick = (value) => { picked[key] = value; draw(); };
  if (options.length > 5) {
    const select = make("select", { name: key, "data-text": title, onchange: (event) => pick(event.target.value) },
      ...options.map(([value, text]) => make("option", { value, dir: "auto" }, text)));
    select.value = picked[key];
    return make("fieldset", {}, make("legend", {}, title), select);
  }
  const chips = options.map(([value, text]) => chip({
    type: "radio", name: key, checked: picked[key] === value, text,
    change: () => pick(value),
  }));
  return make("fieldset", {}, make("legend", {}, title), make("div", { class: "chips" }, ...chips));
}

function chip({ type, name, checked, text, change }) {
  const input = make("input", { type, name, "data-text": text, onchange: change });
  input.checked = checked;
  return make("label", { class: "chip" }, input, make("span", { dir: "auto" }, text));
}

function gridOf(width, panels, least = 290, most = 640) {
  const room = Math.max(1, Math.floor((width + 26) / (least + 26)));
  const columns = panels.length === 4 && room === 3 ? 2 : Math.min(room, panels.length);
  const each = Math.min(most, (width - 26 * (columns - 1)) / columns);
  const grid = make("div", { class: "grid", style: { "grid-template-columns": `repeat(${columns}, ${Math.floor(each)}px)` } });
  for (const { title, note, svg } of panels) {
    const chart = svg(Math.floor(each));
    grid.append(make("div", { class: "panel" },
      make("h4", {}, bdi(title), note ? make("span", { class: "n" }, `${title ? "  " : ""}${note}`) : null),
      chart, saveButton(chart)));
  }
  return grid;
}

// A panel for each series: it in colour, all others behind it.
function oneByOne(series, axes, title) {
  return series.map((each) => ({
    title: each.name,
    note: "",
    svg: (width) => linePanel({
      width, height: 130, ...axes, labels: false, quiet: true, description: `${title}: ${each.name}`,
      series: series.map((other) => ({
        ...other,
        band: other === each,
        look: other === each
          ? { ...look(each.name), chosen: true, tint: look(each.name).chosen ? look(each.name).tint : "var(--ink)" }
          : { chosen: false, tint: "var(--others)", shape: 0, dash: "" },
      })),
    }),
  }));
}

function byBudget(rows, width) {
  const judged = rows.filter((row) => row.right != null);
  const shares = judged.every((row) => row.budget == null || row.budget_text.endsWith("%"));
  const axis = picker("budget", "x", "Across", [
    ...(shares ? [["budget", "budget"]] : []), ["held", "measured peak"],
  ]);
  const asked = picked["budget:x"] === "budget";
  const place = (row) => (asked && row.budget != null ? row.budget : row.held) || null;
  const panels = [...groupBy(judged, (row) => conditionText(row, "task", "protocol", "length"))]
    .map(([title, own]) => [title, own.filter((row) => place(row) != null)])
    .filter(([, own]) => distinct(own, (row) => row.label) > 1 || distinct(own, (row) => row.budget_text) > 1);
  if (!panels.length) return null;
  const several = panels.some(([, own]) => [...groupBy(own, (row) => row.label).values()].some((each) => each.length > 1));
  const view = several && picker("budget", "view", "View", [
    ["together", "together"], ["each", "each policy"], ["ranked", "ranked"],
  ]);
  const kind = several ? picked["budget:view"] : "ranked";
  const ranked = kind === "ranked" ? rankedBy("budget", judged) : null;
  const where = kind === "each" ? picker("budget", "where", "Task", panels.map(([title]) => [title, title])) : null;
  const x = logAxis(panels.flatMap(([, own]) => own.map(place)), shortPercent);
  const parts = [make("div", { class: "pickers" }, view || null, where, kind === "ranked" ? ranked.picker : axis)];
  if (kind === "ranked") {
    const kept = panels.map(([title, own]) => [title, own.filter(ranked.keep)]).filter(([, own]) => own.length);
    parts.push(gridOf(width, kept.map(([title, own]) => ({
      title, note: "",
      svg: (wide) => rankPanel({
        width: wide, domain: [0, 1], text: SHARE.text, description: `Share of right answers, ${title}`,
        items: own.map((row) => ({
          name: row.label, s: LABELS.indexOf(row.label), look: look(row.label), value: row.right,
          low: row.right_low, high: row.right_high, n: row.n, text: percent(row.right), tip: rowTip(row),
        })),
      }),
    })), 400));
  } else {
    const point = (row) => ({ x: place(row), y: row.right, low: row.right_low, high: row.right_high });
    const all = panels.map(([title, own]) => ({
      title, note: nText(own), own,
      svg: (wide) => linePanel({
        width: wide, height: 250, series: seriesOf(own, point), x, y: SHARE, description: `Share of right answers by budget, ${title}`,
      }),
    }));
    if (kind === "together") parts.push(gridOf(width, all, 400));
    else for (const { title, note, own } of all.filter((each) => each.title === picked["budget:where"]))
      parts.push(
        make("h3", {}, bdi(title), make("span", { class: "n" }, `  ${note}`)),
        gridOf(width, oneByOne(seriesOf(own, point), { x, y: { ...SHARE, ticks: [0, 0.5, 1] } }, title), 150, 240),
      );
  }
  return {
    title: "What a budget buys",
    deck: "Share of right answers against the share of the full cache that a policy may hold on the device.",
    parts,
    note: "Whiskers and bands are 95 % Wilson intervals. Policies without a budget of their own stand at the peak that they held. "
      + "Point at a line to see which it is; click it, or a name in the list, to keep it in colour.",
  };
}

// Which budget is looked at; what has none is shown beside each.
function rankedBy(figure, rows, ...others) {
  const budgets = [...new Map(rows.filter((row) => row.budget != null).map((row) => [row.budget_text, row.budget]))];
  const found = picker(figure, "budget", "Budget", budgets.map(([text]) => [text, text]));
  const at = picked[`${figure}:budget`];
  return { picker: found, keep: (row) => row.budget == null || row.budget_text === at };
}

function byLength(rows, width, measure) {
  const panels = [];
  for (const [title, own] of groupBy(rows.filter((row) => row.length != null), (row) => conditionText(row, "task", "protocol"))) {
    if (distinct(own, (row) => row.length) < 2) continue;
    const none = own.filter((row) => row.budget == null);
    const budgets = groupBy(own.filter((row) => row.budget != null), (row) => row.budget_text);
    if (!budgets.size) budgets.set("no budget", []);
    panels.push([title, [...budgets].map(([budget, some]) => [budget, [...some, ...none]])]);
  }
  if (!panels.length) return [];
  const lengths = [...new Set(panels.flatMap(([, all]) => all.flatMap(([, own]) => own.map((row) => row.length))))].sort((a, b) => a - b);
  const x = logAxis(lengths, lengthText, 1.06, lengths);
  const values = panels.flatMap(([, all]) => all.flatMap(([, own]) => own.map((row) => measure.of(row).y))).filter((value) => value > 0);
  if (!values.length) return [];
  const y = measure.axis(values);
  return panels.flatMap(([title, all]) => [
    make("h3", {}, bdi(title)),
    gridOf(width, all.map(([budget, own]) => ({
      title: all.length > 1 || own.some((row) => row.budget != null) ? `budget ${budget}`.replace("budget no budget", "no budget") : "",
      note: nText(own),
      svg: (wide) => linePanel({
        width: wide, series: seriesOf(own, (row) => ({ x: row.length, ...measure.of(row) })), x, y,
        description: `${measure.name} by length, ${title}, budget ${budget}`,
      }),
    }))),
  ]);
}

function accuracyByLength(rows, width) {
  const parts = byLength(rows.filter((row) => row.right != null), width, {
    name: "Share of right answers",
    of: (row) => ({ y: row.right, low: row.right_low, high: row.right_high }),
    axis: () => SHARE,
  });
  return parts.length ? {
    title: "What length does",
    deck: "Share of right answers against the length of the text.",
    parts,
    note: "Whiskers are 95 % Wilson intervals. Policies without a budget are in every panel.",
  } : null;
}

function memoryByLength(rows, width) {
  const choice = picker("memory", "of", "Device bytes", [["device_bytes_peak", "peak"], ["device_bytes_mean", "mean of the steps"]]);
  const of = picked["memory:of"];
  const parts = byLength(rows.filter((row) => row.right != null), width, {
    name: "Device bytes",
    of: (row) => ({ y: row[of] / 2 ** 20 || null }),
    axis: (values) => logAxis(values, (value) => number(value, value < 1 ? 1 : 0)),
  });
  return parts.length ? {
    title: "What it costs on the device",
    deck: "MiB of cache for one answer, against the length of the text; both scales are logarithmic.",
    parts: [make("div", { class: "pickers" }, choice), ...parts],
    note: "Measured from the storages of everything that the cache holds on the device, indexes included. "
      + "The peak is the largest of all answers.",
  } : null;
}

function needles(rows, width) {
  const passing = new Map(rows.map((row) => [row.at, row]));
  const found = DATA.needles.filter((needle) => passing.has(needle.row)).map((needle) => ({ ...needle, row: passing.get(needle.row) }));
  const spread = (own) => distinct(own, (needle) => needle.row.length) > 1 || own.some((needle) => needle.depth.length > 1);
  const conditions = [...groupBy(found, (needle) => conditionText(needle.row, "task", "protocol"))].filter(([, own]) => spread(own));
  if (!conditions.length) return null;
  const where = picker("needles", "where", "Task", conditions.map(([text]) => [text, text]));
  const own = conditions.find(([text]) => text === picked["needles:where"])[1];
  const budget = rankedBy("needles", own.map((needle) => needle.row));
  const shown = own.filter((needle) => budget.keep(needle.row));
  const columns = [...new Set(own.map((needle) => needle.row.length))].sort((a, b) => a - b);
  const lines = [...new Set(own.flatMap((needle) => needle.depth))].sort((a, b) => a - b);
  const panels = [...groupBy(shown, (needle) => needle.row.label)].map(([title, each]) => {
    const cells = each.flatMap((needle) => needle.depth.map((depth, at) => ({
      column: needle.row.length, line: depth, value: needle.right[at] / needle.n[at], n: needle.n[at],
      tip: () => [
        title,
        ["length", lengthText(needle.row.length)],
        ["depth", percent(depth, 0)],
        ["budget", budgetText(needle.row)],
        ["right", `${needle.right[at]} of ${needle.n[at]}`],
        ["95 % interval", range(...needle.interval[at], (value) => percent(value, 0))],
      ],
    })));
    return {
      title, note: nText(cells),
      svg: (wide) => heatPanel({
        width: wide, columns, lines, cells, columnText: lengthText, lineText: (value) => percent(value, 0),
        description: `Share of right answers by length and depth, ${title}`,
      }),
    };
  });
  const key = make("p", { class: "note" }, "0 % right", make("span", { class: "ramp" }), "100 %; across: length, down: depth of the needle, 0 % at the beginning. n is that of a cell.");
  return {
    title: "Where needles get lost",
    deck: "Share of needles found, in percent, by length of the text and depth of the needle.",
    parts: [make("div", { class: "pickers" }, where, budget.picker), key, gridOf(width, panels, 150, 230)],
    note: "Cells hold few needles: point at one for its 95 % interval.",
  };
}

function throughput(rows, width) {
  const timed = rows.filter((row) => row.tokens_per_second != null);
  const conditions = [...groupBy(timed, (row) => conditionText(row, "task", "protocol", "length"))];
  if (!conditions.length) return null;
  const where = picker("throughput", "where", "Task", conditions.map(([text]) => [text, text]));
  const own = conditions.find(([text]) => text === picked["throughput:where"])[1];
  const budget = rankedBy("throughput", own);
  const items = own.filter(budget.keep).map((row) => ({
    name: row.label, s: LABELS.indexOf(row.label), look: look(row.label), value: row.tokens_per_second,
    low: row.tokens_per_second_low, high: row.tokens_per_second_high, n: row.timed, text: number(row.tokens_per_second, 1),
    tip: () => [
      row.label, ["tokens/s", number(row.tokens_per_second, 1)],
      ["95 % interval", range(row.tokens_per_second_low, row.tokens_per_second_high, (value) => number(value, 1))],
      ["timed answers", number(row.timed)], ["budget", budgetText(row)],
      ["to the device", mebibytes(row.bytes_to_device)],
    ],
  }));
  const high = Math.max(...items.map((item) => item.high));
  return {
    title: "How fast it answers",
    deck: "Generated tokens a second. Prompts that were read once for all policies cost nothing here.",
    parts: [
      make("div", { class: "pickers" }, where, budget.picker),
      gridOf(width, [{
        title: "", note: "",
        svg: (wide) => rankPanel({ width: wide, items, domain: [0, high], bars: true, text: (value) => number(value, high < 4 ? 1 : 0), description: "Tokens a second" }),
      }], 290, 720),
    ],
    note: "An answer's time is its batch's, divided by the batch. Lines at the ends of bars are 95 % intervals over answers.",
  };
}

function agreeability(rows, width) {
  const passing = new Map(rows.map((row) => [row.at, row]));
  const found = DATA.agreeability.filter((each) => passing.has(each.row));
  if (!found.length) return null;
  const KINDS = [
    ["right", { chosen: true, tint: "var(--c0)", shape: 0, dash: "" }],
    ["wrong", { chosen: true, tint: "var(--c1)", shape: 2, dash: "6 2" }],
  ];
  const parts = found.flatMap((each) => {
    const row = passing.get(each.row);
    const steps = KINDS.flatMap(([kind]) => each[kind].step);
    const x = { domain: [1, Math.max(2, ...steps)], ticks: linearTicks([1, Math.max(2, ...steps)]), text: (value) => number(value) };
    const marks = each.crossover == null ? [] : [{ at: each.crossover, text: `crossover: step ${each.crossover}` }];
    const curves = (name) => KINDS.map(([kind, style]) => ({
      name: kind, s: null, look: style, band: true,
      points: each[kind].step.map((step, at) => ({
        x: step, y: each[kind][name][at],
        low: name === "mean" ? each[kind].low[at] : each[kind].sd[at], high: name === "mean" ? each[kind].high[at] : each[kind].sd[at],
        tip: () => [
          `${kind} answers, step ${step}`, ["mean", percent(each[kind].mean[at])],
          ["95 % interval", range(each[kind].low[at], each[kind].high[at], (value) => percent(value))],
          ["standard deviation", each[kind].sd[at] == null ? null : percent(each[kind].sd[at])], ["n", number(each[kind].n[at])],
        ],
      })).filter((point) => point.y != null),
    })).filter((one) => one.points.length);
    const axis = (name) => {
      const values = curves(name).flatMap((one) => one.points.flatMap((point) => [point.low, point.high]));
      const domain = name === "sd" ? [0, Math.max(0.01, ...values) * 1.1] : [Math.max(0, Math.min(...values) - 0.03), Math.min(1, Math.max(...values) + 0.03)];
      return { domain, ticks: linearTicks(domain), text: shortPercent };
    };
    const panels = [["mean", "Mean"], ["sd", "Standard deviation"]].filter(([name]) => curves(name).length).map(([name, title]) => ({
      title, note: `${number(each.right.answers)} right, ${number(each.wrong.answers)} wrong answers`,
      svg: (wide) => linePanel({ width: wide, height: 240, series: curves(name), x, y: axis(name), marks, description: `${title} of agreeability by selection step, ${row.label}` }),
    }));
    return [
      make("h3", {}, bdi([row.label, conditionText(row, "task", "protocol", "length"), row.budget == null ? "" : `budget ${row.budget_text}`].filter(Boolean).join(", "))),
      make("p", { class: "finding" }, finding(each)),
      gridOf(width, panels, 330, 560),
    ];
  });
  return {
    title: "Do heads agree sooner when the answer is right?",
    deck: "Agreeability: the share of all votes that went to the paragraphs read in full, at each selection step.",
    parts,
    note: "Bands are 95 % intervals of the mean. Steps with at least two answers of each kind are compared. The crossover is the step "
      + "up to which the right answers' summed lead is largest; the early gap is their mean lead up to it. After ZoomR (arXiv 2604.10898, section 4.3).",
  };
}

function finding(each) {
  if (!each.compared) return "Too few answers of each kind to compare them.";
  const gap = number(Math.abs(100 * each.early_gap), 1);
  const more = each.early_gap >= 0 ? "more" : "less";
  const lead = each.crossover == null
    ? `Over all ${each.compared} compared steps, right answers agree ${gap} points ${more} than wrong ones on average; there is no crossover.`
    : `Up to step ${each.crossover}, right answers agree ${gap} points ${more} than wrong ones on average; after it wrong ones agree more on balance.`;
  return `${lead} Standard deviation over answers, mean of the steps: ${percent(each.right_sd)} right, ${percent(each.wrong_sd)} wrong.`;
}

function fidelity(rows, width) {
  const passing = new Map(rows.map((row) => [row.at, row]));
  const found = DATA.fidelity.filter((curve) => passing.has(curve.row) && curve.position.length > 1);
  if (!found.length) return null;
  const measure = picker("fidelity", "of", "Measure", [["kl", "KL divergence"], ["top1", "same likeliest token"]]);
  const name = picked["fidelity:of"];
  const positive = found.flatMap((curve) => curve.kl).filter((value) => value > 0).sort((a, b) => a - b);
  const floor = positive.length ? 10 ** Math.floor(Math.log10(positive[Math.floor(positive.length / 100)])) : 1e-3;
  const y = name === "top1" ? SHARE
    : { ...logAxis([floor, Math.max(10 * floor, positive.at(-1) ?? 0)], (value) => String(value), 1), ticks: [] };
  if (name === "kl") y.ticks = logTicks(y.domain, [1, 1, 1, 1]).filter((tick, at, all) => all.indexOf(tick) === at);
  const places = found.flatMap((curve) => curve.position);
  const x = { domain: [0, Math.max(...places)], ticks: linearTicks([0, Math.max(...places)]), text: (value) => number(value) };
  const none = found.filter((curve) => passing.get(curve.row).budget == null);
  const budgets = groupBy(found.filter((curve) => passing.get(curve.row).budget != null), (curve) => passing.get(curve.row).budget_text);
  if (!budgets.size) budgets.set(null, []);
  const panels = [...budgets].map(([budget, own]) => {
    const all = [...own, ...none];
    return {
      title: budget == null ? "no budget" : `budget ${budget}`, note: nText(all.map((curve) => passing.get(curve.row))),
      svg: (wide) => linePanel({
        width: wide, height: 240, x, y, description: `Fidelity by position, budget ${budget ?? "none"}`,
        series: all.map((curve) => {
          const row = passing.get(curve.row);
          return {
            name: row.label, s: LABELS.indexOf(row.label), look: look(row.label), band: true,
            points: curve.position.map((position, at) => ({
              x: position, y: curve[name][at], low: curve[`${name}_low`][at], high: curve[`${name}_high`][at],
              tip: () => [
                row.label, ["position", curve.width > 1 ? range(position, position + curve.width - 1, number) : number(position)],
                ["KL, nats", curve.kl[at].toPrecision(3)], ["same likeliest", percent(curve.top1[at])], ["n", number(curve.n[at])],
              ],
            })),
          };
        }),
      }),
    };
  });
  return {
    title: "How far it drifts from the full cache",
    deck: name === "kl" ? "KL(full ‖ policy) of the next token in nats, along the full cache's own answer; logarithmic."
      : "Share of positions where policy and full cache hold the same token for the likeliest.",
    parts: [make("div", { class: "pickers" }, measure), gridOf(width, panels, 400)],
    note: `Bands are 95 % intervals over answers; n is the number of answers at the beginning.${name === "kl" ? ` Values below ${floor} stand on the lowest line.` : ""}`,
  };
}

const FIGURES = {
  budget: byBudget, length: accuracyByLength, memory: memoryByLength, needles, throughput, agreeability, fidelity,
};
