// Panels: lines, ranked bars and dots, heat maps. Each returns an SVG as wide as it is told.

const SHAPES = [
  (r) => `M${-r} 0A${r} ${r} 0 1 0 ${r} 0A${r} ${r} 0 1 0 ${-r} 0Z`,
  (r) => `M${-r * 0.9} ${-r * 0.9}H${r * 0.9}V${r * 0.9}H${-r * 0.9}Z`,
  (r) => `M0 ${-r * 1.2}L${r * 1.15} ${r * 0.85}H${-r * 1.15}Z`,
  (r) => `M0 ${-r * 1.3}L${r * 1.15} 0L0 ${r * 1.3}L${-r * 1.15} 0Z`,
  (r) => `M0 ${r * 1.2}L${r * 1.15} ${-r * 0.85}H${-r * 1.15}Z`,
  (r) => `M${-r * 1.2} ${-r * 0.4}H${-r * 0.4}V${-r * 1.2}H${r * 0.4}V${-r * 0.4}H${r * 1.2}V${r * 0.4}H${r * 0.4}V${r * 1.2}H${-r * 0.4}V${r * 0.4}H${-r * 1.2}Z`,
  (r) => `M${-r * 1.1} ${-r * 0.75}L${-r * 0.75} ${-r * 1.1}L0 ${-r * 0.35}L${r * 0.75} ${-r * 1.1}L${r * 1.1} ${-r * 0.75}L${r * 0.35} 0L${r * 1.1} ${r * 0.75}L${r * 0.75} ${r * 1.1}L0 ${r * 0.35}L${-r * 0.75} ${r * 1.1}L${-r * 1.1} ${r * 0.75}L${-r * 0.35} 0Z`,
];
const CHARACTER = 7.2; // pixels that a character of a label takes, about

function swatch(label) {
  const { tint, shape, chosen } = look(label);
  const mark = make("path", { d: SHAPES[shape](chosen ? 4.5 : 3), transform: "translate(7 7)", fill: tint });
  return make("svg", { width: 14, height: 14, "aria-hidden": "true" }, mark);
}

function linear([low, high], [from, to]) {
  return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

function logarithmic([low, high], [from, to]) {
  const inner = linear([Math.log(low), Math.log(high)], [from, to]);
  return (value) => inner(Math.log(Math.max(value, low)));
}

function logTicks([low, high], steps = [1, 2, 5]) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const step of steps) {
      const tick = Number((step * 10 ** power).toPrecision(3));
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  return ticks.length >= 2 || steps.length > 3 ? ticks : logTicks([low, high], [1, 1.5, 2, 3, 4, 5, 6, 8]);
}

function linearTicks([low, high], count = 4) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * 1.0001 + 1e-12; at += 1)
    ticks.push(Number((at * step).toPrecision(10)));
  return ticks;
}

// Every other tick goes until their texts don't touch.
function thinned(ticks, place, text) {
  let kept = ticks;
  const crowded = () =>
    kept.some((tick, at) => at && Math.abs(place(tick) - place(kept[at - 1])) < CHARACTER * text(tick).length + 8);
  while (kept.length > 2 && crowded()) kept = kept.filter((_, at) => (kept.length - 1 - at) % 2 === 0);
  return kept;
}

// quiet: what is not chosen has no dots. series: {name, s, look, points: [{x, y, low, high, tip}], band}; x and y: {domain, log, ticks, text}.
function linePanel({ width, height = 220, series, x, y, description, marks = [], labels = true, quiet = false }) {
  const share = (x.log ? logarithmic : linear)(x.domain, [0, 1]);
  const ends = series.filter((each) => labels && each.look.chosen && each.points.length && share(each.points.at(-1).x) > 0.93);
  const margin = Math.min(width * 0.3, Math.max(14, ...ends.map((each) => 16 + CHARACTER * shortened(each.name).length)));
  const box = { left: 40, right: width - margin, top: 12, bottom: height - 22 };
  const across = (x.log ? logarithmic : linear)(x.domain, [box.left, box.right]);
  const up = (y.log ? logarithmic : linear)(y.domain, [box.bottom, box.top]);
  const svg = make("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": description,
  });
  for (const tick of y.ticks) {
    svg.append(make("line", { class: "gridline", x1: box.left, x2: box.right, y1: up(tick), y2: up(tick) }));
    svg.append(make("text", { x: box.left - 6, y: up(tick) + 4, "text-anchor": "end" }, y.text(tick)));
  }
  svg.append(make("path", { class: "axis", d: `M${box.left} ${box.bottom + 0.5}H${box.right}` }));
  for (const tick of thinned(x.ticks, across, x.text)) {
    svg.append(make("path", { class: "axis", d: `M${across(tick)} ${box.bottom}v4` }));
    svg.append(make("text", { x: across(tick), y: box.bottom + 16, "text-anchor": "middle" }, x.text(tick)));
  }
  for (const { at, text } of marks) {
    const end = across(at) > (box.left + box.right) / 2;
    svg.append(make("line", { class: "mark-line", x1: across(at), x2: across(at), y1: box.top, y2: box.bottom }));
    const place = { x: across(at) + (end ? -5 : 5), y: box.bottom - 6, "text-anchor": end ? "end" : "start" };
    svg.append(make("text", place, text));
  }
  const targets = [];
  const placed = [];
  const last = [];
  const drawn = [...series].sort((a, b) => a.look.chosen - b.look.chosen);
  const emphasised = drawn.filter((each) => each.look.chosen);
  for (const each of drawn) {
    const { chosen, tint, shape, dash } = each.look;
    // Whiskers of chosen series at one place stand side by side.
    const dodge = chosen && !each.band ? 4 * (emphasised.indexOf(each) - (emphasised.length - 1) / 2) : 0;
    const group = make("g", { class: `series${chosen ? " chosen" : ""}`, "data-s": each.s, style: { "--tint": tint } });
    const places = each.points.map((point) => [across(point.x) + dodge, up(point.y)]);
    const inside = (value) => Math.min(box.bottom, Math.max(box.top, up(value)));
    if (each.band && chosen && places.length > 1) {
      const above = each.points.map((point, at) => `${places[at][0]} ${inside(point.high)}`);
      const below = each.points.map((point, at) => `${places[at][0]} ${inside(point.low)}`).reverse();
      group.append(make("path", { class: "band", d: `M${[...above, ...below].join("L")}Z` }));
    }
    if (places.length > 1)
      group.append(make("path", { class: "line", "stroke-dasharray": dash, d: `M${places.map((place) => place.join(" ")).join("L")}` }));
    each.points.forEach((point, at) => {
      const [px, py] = places[at];
      targets.push({ x: px, y: py, tip: point.tip, s: each.s, chosen });
      if (each.band && places.length > 1) return;
      if (point.low != null)
        group.append(make("line", { class: "whisker", x1: px, x2: px, y1: inside(point.low), y2: inside(point.high) }));
      if (chosen || !quiet)
        group.append(make("path", { class: "dot", d: SHAPES[shape](chosen ? 4 : 2.2), transform: `translate(${px} ${py})` }));
      if (chosen) placed.push([px - 5, py - 5, px + 5, py + 5]);
    });
    svg.append(group);
    if (chosen && labels && places.length) last.push([each, places.at(-1), group]);
  }
  directLabels(last, placed, width, box);
  attend(svg, targets);
  return svg;
}

// Those of lines that end at the right stand in the margin, one below the other; the others find
// room beside their last point.
function directLabels(last, placed, width, box) {
  const line = 13;
  const atEnd = last.filter(([, [px]]) => px > box.left + 0.93 * (box.right - box.left)).sort((a, b) => a[1][1] - b[1][1]);
  let y = -Infinity;
  const heights = atEnd.map(([, [, py]]) => (y = Math.max(py, y + line, box.top)));
  for (let at = heights.length - 1, most = box.bottom - 3; at >= 0 && heights[at] > most; at -= 1, most -= line) heights[at] = most;
  const startX = Math.max(box.right, ...atEnd.map(([, [px]]) => px)) + 10;
  atEnd.forEach(([each, [px, py], group], at) => {
    if (Math.abs(heights[at] - py) > 5)
      group.append(make("path", { class: "leader", d: `M${px + 4} ${py}L${startX - 2} ${heights[at]}` }));
    putLabel(group, each.name, startX, heights[at], placed);
  });
  for (const [each, [px, py], group] of last.filter((one) => !atEnd.includes(one))) {
    const wide = CHARACTER * shortened(each.name).length;
    const shifts = [0, 13, -13, 26, -26, 39, -39, 52, -52, 65, 78];
    const tries = [8, -8 - wide].flatMap((side) => shifts.map((shift) => [px + side, py + shift]));
    const fits = ([x, y]) =>
      x >= box.left && x + wide <= width + 2 && y >= box.top - 4 && y <= box.bottom - 2 &&
      !placed.some(([x1, y1, x2, y2]) => x < x2 && x + wide > x1 && y - 6 < y2 && y + 6 > y1);
    const found = tries.find(fits);
    if (found) putLabel(group, each.name, ...found, placed);
  }
}

function putLabel(group, name, x, y, placed) {
  const text = shortened(name);
  placed.push([x, y - 6, x + CHARACTER * text.length, y + 6]);
  group.append(make("text", { class: "label", x, y: y + 4 }, text));
}

function shortened(name, most = 18) {
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}

// One line for each item, best first: {name, s, look, value, low, high, n, text, tip}.
function rankPanel({ width, items, domain, bars, text, description }) {
  const line = 22;
  const names = Math.min(166, 14 + 1.15 * CHARACTER * Math.max(...items.map((item) => Math.min(20, item.name.length))));
  const box = { left: names, right: width - 108 };
  const across = linear(domain, [box.left, box.right]);
  const height = items.length * line + 20;
  const svg = make("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": description,
  });
  for (const tick of thinned(linearTicks(domain), across, text)) {
    svg.append(make("line", { class: "gridline", x1: across(tick), x2: across(tick), y1: 16, y2: height }));
    svg.append(make("text", { x: across(tick), y: 10, "text-anchor": "middle" }, text(tick)));
  }
  svg.append(make("text", { x: width, y: 10, "text-anchor": "end" }, "n"));
  const targets = [];
  [...items].sort((a, b) => b.value - a.value).forEach((item, at) => {
    const y = 20 + at * line + line / 2;
    const { chosen, tint, shape } = item.look;
    const group = make(
      "g", { class: `series${chosen ? " chosen" : ""}`, "data-s": item.s, style: { "--tint": tint } },
      make("text", { class: "name", x: names - 8, y: y + 4, "text-anchor": "end" }, shortened(item.name, 20)),
    );
    if (bars)
      group.append(make("rect", { class: "bar", x: box.left, y: y - 6, width: Math.max(1, across(item.value) - box.left), height: 12 }));
    const whisker = { x1: across(item.low), x2: across(Math.min(item.high, domain[1])), y1: y, y2: y };
    group.append(make("line", { class: "whisker", ...whisker, style: { opacity: 1, ...(bars ? { stroke: "var(--ink)" } : {}) } }));
    if (!bars) group.append(make("path", { class: "dot", d: SHAPES[shape](chosen ? 4.5 : 3.5), transform: `translate(${across(item.value)} ${y})` }));
    group.append(make("text", { class: "value", x: width - 44, y: y + 4, "text-anchor": "end" }, item.text));
    group.append(make("text", { x: width, y: y + 4, "text-anchor": "end" }, number(item.n)));
    targets.push({ x: across(item.value), y, tip: item.tip, s: item.s, chosen });
    svg.append(group);
  });
  attend(svg, targets, true);
  return svg;
}

// columns and lines: values in their order; cells: {column, line, value, tip}.
function heatPanel({ width, columns, lines, cells, columnText, lineText, description }) {
  const left = 36;
  const wide = (width - left) / columns.length;
  const tall = Math.max(16, Math.min(26, wide * 0.6));
  const height = lines.length * tall + 18;
  const svg = make("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "img", "aria-label": description,
  });
  const shown = thinned(columns.map((_, at) => at), (at) => left + at * wide, (at) => columnText(columns[at]));
  for (const at of shown)
    svg.append(make("text", { x: left + (at + 0.5) * wide, y: height - 4, "text-anchor": "middle" }, columnText(columns[at])));
  lines.forEach((line, at) => {
    if (at % Math.ceil(lines.length / 6) === 0 || at === lines.length - 1)
      svg.append(make("text", { x: left - 6, y: (at + 0.5) * tall + 4, "text-anchor": "end" }, lineText(line)));
  });
  const targets = [];
  for (const cell of cells) {
    const x = left + columns.indexOf(cell.column) * wide, y = lines.indexOf(cell.line) * tall;
    svg.append(make("rect", { class: "cell", x, y, width: wide, height: tall, style: { fill: heat(cell.value) } }));
    if (wide >= 26)
      svg.append(make("text", {
        class: cell.value > 0.6 ? "on-high" : "on-low", x: x + wide / 2, y: y + tall / 2 + 4, "text-anchor": "middle",
      }, number(100 * cell.value)));
    targets.push({ x: x + wide / 2, y: y + tall / 2, tip: cell.tip, box: [x, y, wide, tall] });
  }
  attend(svg, targets);
  return svg;
}

function heat(value) {
  const [from, to, part] = value < 0.5 ? ["low", "middle", 2 * value] : ["middle", "high", 2 * value - 1];
  return `color-mix(in oklab, var(--heat-${to}) ${(100 * part).toFixed(1)}%, var(--heat-${from}))`;
}

// Pointer, touch and keys reach every point; arrows go through a series and to the next one.
function attend(svg, targets, byLine = false) {
  let current = null;
  const cursor = make("path", { class: "cursor" });
  const show = (target) => {
    if (current === target) return;
    current = target;
    cursor.setAttribute("d", target.box
      ? `M${target.box[0]} ${target.box[1]}h${target.box[2]}v${target.box[3]}h${-target.box[2]}Z`
      : SHAPES[0](7));
    cursor.setAttribute("transform", target.box ? "" : `translate(${target.x} ${target.y})`);
    svg.append(cursor);
    heatUp(target.s);
    showTip(svg, target);
  };
  const leave = () => {
    current = null;
    cursor.remove();
    heatUp(null);
    hideTip();
  };
  const nearest = (event) => {
    const frame = svg.getBoundingClientRect();
    const x = event.clientX - frame.left, y = event.clientY - frame.top;
    let best = null, least = byLine ? 15 : 34;
    for (const target of targets) {
      const distance = target.box
        ? (x >= target.box[0] && x < target.box[0] + target.box[2] && y >= target.box[1] && y < target.box[1] + target.box[3] ? 0 : 99)
        : byLine ? Math.abs(y - target.y) : Math.hypot(x - target.x, y - target.y) - (target.chosen ? 2 : 0);
      if (distance < least) [best, least] = [target, distance];
    }
    return best;
  };
  svg.addEventListener("pointermove", (event) => {
    const found = nearest(event);
    if (found) show(found);
    else if (current) leave();
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  let tapped = null;
  svg.addEventListener("click", (event) => {
    const found = current ?? nearest(event);
    // A finger can't point first: its first tap shows, the second chooses.
    if (event.pointerType === "touch" && found && found !== tapped) {
      tapped = found;
      return show(found);
    }
    if (found?.s != null) toggle(LABELS[found.s]);
  });
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return leave();
    if (event.key === "Enter" && current?.s != null) return toggle(LABELS[current.s]);
    const next = step(targets, current, event.key, byLine);
    if (!next) return;
    event.preventDefault();
    show(next);
  });
}

function step(targets, current, key, byLine) {
  const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  if (!move || !targets.length) return null;
  if (!current) {
    const chosen = targets.filter((target) => target.chosen);
    return byLine || !chosen.length ? targets[0] : chosen.reduce((best, each) => (each.x < best.x ? each : best));
  }
  // The nearest point in that direction; sideways, of the same series if it has one.
  const ahead = targets.filter((target) => {
    const along = (target.x - current.x) * move[0] + (target.y - current.y) * move[1];
    return along > 0.5 || (move[1] && along >= 0 && target.s > current.s && target.y === current.y);
  });
  const own = move[0] && current.s != null ? ahead.filter((target) => target.s === current.s) : [];
  const distance = (target) => {
    const dx = target.x - current.x, dy = target.y - current.y;
    return move[0] ? Math.abs(dx) + 3 * Math.abs(dy) : Math.abs(dy) + 3 * Math.abs(dx);
  };
  return (own.length ? own : ahead).reduce((best, each) => (!best || distance(each) < distance(best) ? each : best), null);
}

function heatUp(s) {
  for (const element of document.querySelectorAll(".hot")) element.classList.remove("hot");
  if (s == null) return;
  for (const element of document.querySelectorAll(`[data-s="${s}"]`)) {
    element.style.setProperty("--hot", look(LABELS[s]).chosen ? look(LABELS[s]).tint : "var(--ink)");
    element.classList.add("hot");
  }
}

function showTip(svg, target) {
  const tip = document.getElementById("tip");
  const [title, ...facts] = target.tip();
  const list = make("dl");
  for (const [name, text] of facts) if (text != null) list.append(make("dt", {}, name), make("dd", {}, text));
  tip.replaceChildren(make("b", {}, bdi(title)), list);
  tip.hidden = false;
  const frame = svg.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const x = frame.left + target.x, y = frame.top + target.y;
  const left = x + 14 + width < innerWidth - 8 ? x + 14 : Math.max(8, x - 14 - width);
  const top = Math.min(Math.max(8, y - height / 2), innerHeight - height - 8);
  tip.style.transform = `translate(${Math.round(Math.max(4, Math.min(left, innerWidth - width - 8)))}px, ${Math.round(top)}px)`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
