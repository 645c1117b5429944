// The table: every row that passes, sortable by every column.

const shareOf = (name) => ({ value: (row) => row[name], text: (row) => percent(row[name]) });
const bytesOf = (name) => ({ value: (row) => row[name], text: (row) => number(row[name] / 2 ** 20, 2) });

const COLUMNS = [
  { key: "label", title: "Policy", kind: "text first", value: (row) => row.label, node: (row) => [swatch(row.label), bdi(row.label)] },
  { key: "task", title: "Task", kind: "text", value: (row) => row.task, node: (row) => [bdi(row.task)] },
  { key: "budget", title: "Budget", value: (row) => row.budget ?? row.tuned, text: budgetText },
  { key: "protocol", title: "Question", kind: "text", value: (row) => row.protocol, text: (row) => questionText(row).replace("question ", "") },
  { key: "length", title: "Length", value: (row) => row.length, text: (row) => lengthText(row.length) },
  { key: "n", title: "n", value: (row) => row.n, text: (row) => number(row.n) },
  { key: "right", title: "Right (95 %)", value: (row) => row.right, node: rightNode },
  { key: "score", title: "Score", value: (row) => row.score, text: (row) => number(row.score, 3) },
  { key: "held", title: "Peak, of full", ...shareOf("held") },
  { key: "device_bytes_mean", title: "Device, MiB", ...bytesOf("device_bytes_mean") },
  { key: "device_bytes_peak", title: "Device peak, MiB", ...bytesOf("device_bytes_peak") },
  { key: "host_bytes", title: "Host, MiB", ...bytesOf("host_bytes") },
  { key: "bytes_to_device", title: "To device, MiB", ...bytesOf("bytes_to_device") },
  { key: "bytes_to_host", title: "To host, MiB", ...bytesOf("bytes_to_host") },
  { key: "tokens_per_second", title: "Tokens/s (95 %)", value: (row) => row.tokens_per_second, node: speedNode },
  { key: "tokens", title: "Tokens", value: (row) => row.tokens, text: (row) => number(row.tokens, 1) },
  { key: "extracted", title: "Extracted", ...shareOf("extracted") },
  { key: "truncated", title: "Cut off", ...shareOf("truncated") },
  { key: "agreeability", title: "Agreeability", ...shareOf("agreeability") },
  { key: "kl", title: "KL, nats", value: (row) => row.kl, text: (row) => number(row.kl, 4) },
].filter(({ value }) => ROWS.some((row) => value(row) != null));

const sorting = { key: null, descending: false };

function rightNode(row) {
  const place = { "--low": row.right_low, "--high": row.right_high, "--mid": row.right };
  return [
    percent(row.right), " ", make("span", { class: "interval" }, `(${range(row.right_low, row.right_high, (value) => number(100 * value, 1))})`),
    make("span", { class: "range", "aria-hidden": "true", style: place }, make("i"), make("b")),
  ];
}

function speedNode(row) {
  const interval = range(row.tokens_per_second_low, row.tokens_per_second_high, (value) => number(value, 1));
  return [number(row.tokens_per_second, 1), " ", make("span", { class: "interval" }, `(${interval})`)];
}

function sorted(rows) {
  const column = COLUMNS.find(({ key }) => key === sorting.key);
  if (!column) return rows;
  const sign = sorting.descending ? -1 : 1;
  return [...rows].sort((a, b) => {
    const x = column.value(a), y = column.value(b);
    if (x == null || y == null) return (x == null) - (y == null) || a.at - b.at; // what is missing comes last
    return sign * (typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true })) || a.at - b.at;
  });
}

function tableSection() {
  const head = make("tr", {}, ...COLUMNS.map((column) => make(
    "th", { scope: "col", class: column.kind ?? "", "data-key": column.key, "aria-sort": "none" },
    make("button", { type: "button", onclick: () => sortBy(column) }, column.title),
  )));
  return make(
    "section", { class: "figure", id: "figure-table" },
    make("h2", {}, "All numbers"),
    make("p", { class: "deck" }, "One row for each task, policy, budget and length. Click a heading to sort. The same rows stand in table.md and table.csv."),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All numbers" },
      make("table", {}, make("thead", {}, head), make("tbody"))),
  );
}

function sortBy(column) {
  const numeric = !(column.kind ?? "").startsWith("text");
  sorting.descending = sorting.key === column.key ? !sorting.descending : numeric;
  sorting.key = column.key;
  drawTable(ROWS.filter(passes));
}

function drawTable(rows) {
  for (const th of document.querySelectorAll("th[data-key]"))
    th.setAttribute("aria-sort", th.dataset.key !== sorting.key ? "none" : sorting.descending ? "descending" : "ascending");
  const body = document.querySelector("tbody");
  body.replaceChildren(...sorted(rows).map((row) => make(
    "tr", { class: state.chosen.has(row.label) ? "chosen" : "", "data-row": row.at },
    ...COLUMNS.map((column) => {
      const value = column.value(row);
      const content = value == null ? ["—"] : column.node ? column.node(row) : [column.text(row)];
      return make("td", { class: column.kind ?? "", "data-key": column.key, "data-value": value }, ...content);
    }),
  )));
}
