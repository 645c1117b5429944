"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const make = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // -- colours ---------------------------------------------------------------------------------
  const themes = ["auto", "light", "dark"];
  let theme = 0;
  $("theme").addEventListener("click", () => {
    theme = (theme + 1) % themes.length;
    const name = themes[theme];
    if (theme) document.documentElement.dataset.theme = name;
    else delete document.documentElement.dataset.theme;
    $("theme").textContent = `\u25d0\ufe0e ${name}`;
    $("theme").setAttribute("aria-label", theme ? `Colours: ${name}` : "Colours: as the system has them");
  });

  // -- the trace -------------------------------------------------------------------------------
  const trace = JSON.parse($("trace").textContent);
  const { tokens, prompt, groups, levels, spans, choices } = trace;
  const columns = tokens.length, steps = columns - prompt;

  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };
  const numbers = (planes) => {
    const size = planes.length / 4, found = new Uint32Array(size);
    for (let i = 0; i < size; i++) {
      found[i] = planes[i] | planes[size + i] << 8 | planes[2 * size + i] << 16 | planes[3 * size + i] << 24;
    }
    return found;
  };
  let counts, when, values;
  try {
    if (!("DecompressionStream" in window)) throw new Error("this browser is too old to unpack it");
    counts = numbers(await unpack(trace.states.counts));
    when = numbers(await unpack(trace.states.gaps));
    values = await unpack(trace.states.values);
  } catch (error) {
    $("trouble").textContent = `The trace can't be shown: ${error.message}.`;
    $("trouble").hidden = false;
    return;
  }
  const starts = new Uint32Array(counts.length + 1); // of each place's changes
  for (let place = 0, i = 0; place < counts.length; place++) {
    starts[place + 1] = starts[place] + counts[place];
    for (let last = 0; i < starts[place + 1]; i++) last = when[i] += last;
  }

  // Rows of the table: marks, then of each group what share reads a token, then what share reads it
  // in a mean. Each place remembers which of its changes comes next, and goes to and fro.
  const exactRow = (group) => (1 + group) * columns;
  const coarseRow = (group) => (1 + groups.length + group) * columns;
  const initial = new Uint8Array(counts.length);
  groups.forEach((_, group) => initial.fill(levels[group], exactRow(group), exactRow(group) + columns));
  const table = initial.slice(), next = starts.slice(0, -1);
  const seek = (step) => {
    for (let place = 0; place < table.length; place++) {
      const first = starts[place], end = starts[place + 1];
      let i = next[place];
      while (i < end && when[i] <= step) i++;
      while (i > first && when[i - 1] > step) i--;
      if (i === next[place]) continue;
      next[place] = i;
      table[place] = i > first ? values[i - 1] : initial[place];
    }
  };

  // -- what it says ----------------------------------------------------------------------------
  const STATES = ["full", "zoomed", "summary", "coarse", trace.unread];
  const COARSE = 3, UNREAD = 4;
  const NAMES = {
    full: "full text", zoomed: "zoomed", summary: "summary", coarse: "coarse, in a mean",
    host: "on the host only", gone: "evicted",
  };
  const pairsOf = (chosen) => chosen.reduce((sum, group) => sum + groups[group][1] - groups[group][0], 0) * trace.kv_heads;
  const whole = groups.map((_, group) => group);
  let chosen = whole; // groups of layers that are shown
  const exact = new Float64Array(columns), coarse = new Float64Array(columns);
  const weigh = (until) => {
    exact.fill(0);
    coarse.fill(0);
    const layers = pairsOf(chosen) / trace.kv_heads;
    for (const group of chosen) {
      const weight = (groups[group][1] - groups[group][0]) / layers / levels[group];
      const own = exactRow(group), mean = coarseRow(group);
      for (let token = 0; token < until; token++) {
        exact[token] += table[own + token] * weight;
        coarse[token] += table[mean + token] * weight;
      }
    }
  };
  const stateOf = (token) => exact[token] > 0 ? table[token] : coarse[token] > 0 ? COARSE : UNREAD;
  const choiceAt = (step) => {
    let found = null;
    for (const choice of choices) {
      if (choice.step > step) break;
      found = choice;
    }
    return found;
  };
  const spanOf = new Int32Array(columns).fill(-1);
  spans.forEach(({ paragraph, summary }, span) => spanOf.fill(span, paragraph[0], summary[1]));
  const percent = (share) => `${share > 0 && share < .01 ? "under 1" : share < 1 && share > .99 ? "over 99" : Math.round(100 * share)} %`;
  const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  const MIB = 1024 * 1024;
  const mib = (bytes) => `${(bytes / MIB).toFixed(bytes < 10 * MIB ? 2 : 1)} MiB`;
  const quoted = (token) => JSON.stringify(tokens[token]).slice(1, -1).replaceAll('\\"', '"');

  // -- what stays ------------------------------------------------------------------------------
  const options = Object.entries(trace.options).map(([name, value]) => `${name}=${value}`);
  $("about").textContent = [
    [trace.policy, ...options].join(" "), trace.model,
    `${plural(trace.layers, "layer")} of ${plural(trace.kv_heads, "KV head")}`,
    `${plural(prompt, "token")} read, ${steps} written`,
  ].join(" \u00b7 ");

  const cells = tokens.map((text, token) => {
    const cell = make("span", "t", text);
    cell.dataset.token = token;
    cell.tabIndex = -1;
    (token < prompt ? $("prompt") : $("answer")).append(cell);
    return cell;
  });
  const kind = tokens.map((text) => /^[ \t]*\n/.test(text) ? " break" : "");
  let reachable = 0; // the token that the tab key goes to
  cells[0].tabIndex = 0;

  // Which states there are at all, and whether heads differ.
  const possible = new Set([0]);
  let graded = groups.length > 1;
  for (let place = 0; place < counts.length; place++) {
    const row = Math.floor(place / columns);
    for (let i = starts[place]; i < starts[place + 1]; i++) {
      if (!row) possible.add(values[i]);
      else if (row > groups.length) possible.add(COARSE);
      else {
        possible.add(UNREAD);
        graded ||= values[i] % levels[row - 1] > 0;
      }
    }
  }
  const totals = new Map();
  for (const state of [...possible].sort()) {
    const item = make("li");
    item.append(make("span", `t ${STATES[state]} i10`, "Aa"), `${NAMES[STATES[state]]} `);
    totals.set(state, item.appendChild(make("span", "count")));
    $("legend").append(item);
  }
  if (graded) {
    const item = make("li", "scale");
    for (const share of [1, 4, 7, 10]) item.append(make("span", `t full i${share}`, "\u00a0"));
    item.append("the share of the layers\u2019 KV heads that read it");
    $("legend").append(item);
  }
  const shades = make("style");
  shades.textContent = Array.from({ length: 11 }, (_, i) => `.i${i}{--share:${i / 10}}`).join("");
  document.head.append(shades);

  const layers = $("layer");
  if (groups.length === 1) {
    layers.append(make("option", "", trace.layers === 1 ? "0" : "all, which read the same"));
    layers.disabled = true;
  } else {
    layers.append(make("option", "", "all"));
    groups.forEach(([first, end], group) => {
      const choice = make("option", "", end - first === 1 ? `${first}` : `${first} to ${end - 1}`);
      choice.value = group;
      layers.append(choice);
    });
  }

  const slider = $("step"), svg = $("memory");
  slider.max = steps - 1;
  const most = Math.max(...trace.device_bytes, trace.row_bytes * (columns - 1));
  const wide = Math.max(steps - 1, 1);
  svg.setAttribute("viewBox", `0 0 ${wide} 100`);
  const line = (name, d) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", name);
    path.setAttribute("d", d);
    svg.append(path);
    return path;
  };
  const height = (bytes) => (100 - 96 * bytes / most).toFixed(2);
  const full = (step) => trace.row_bytes * (prompt + step);
  const along = (series) => {
    const points = Array.from({ length: steps }, (_, step) => `${step} ${height(series(step))}`);
    if (steps === 1) points.push(`1 ${height(series(0))}`);
    return `M${points.join("L")}`;
  };
  const held = along((step) => trace.device_bytes[step]);
  line("area", `${held}L${wide} 100L0 100Z`);
  line("floor", `M0 100H${wide}`);
  line("whole", along(full));
  line("device", held);
  const place = line("place", "M0 0V100");
  svg.setAttribute("aria-label", `Device bytes of the cache over ${plural(steps, "step")}: ${mib(trace.device_bytes[steps - 1])} in the last one, where a full cache holds ${mib(full(steps - 1))}`);
  const sample = (name) => `<svg viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4H22" fill="none" stroke-width="2" ${name}/></svg>`;
  const bytes = ["device", "whole", "host"].map((name) => {
    const item = make("span");
    if (name !== "host") {
      item.innerHTML = sample(name === "device" ? 'stroke="var(--accent)"' : 'stroke="var(--muted)" stroke-dasharray="5 4"');
    }
    item.append(make("span"));
    $("bytes").append(item);
    return item.lastChild;
  });

  // -- what moves ------------------------------------------------------------------------------
  let step = -1, pointed = -1, timer = 0;
  const marked = new Set();

  const draw = () => {
    const written = prompt + step, query = written - 1;
    seek(step);
    weigh(written);
    const counted = new Array(STATES.length).fill(0);
    let read = 0;
    cells.forEach((cell, token) => {
      let name;
      if (token > written) {
        name = "t later";
      } else if (token === written) {
        name = "t next";
      } else {
        const state = stateOf(token), share = state === COARSE ? coarse[token] : exact[token];
        counted[state]++;
        read += exact[token];
        name = `t ${STATES[state]} i${Math.ceil(10 * share - 1e-9)}`;
        if (token === query) name += " query";
      }
      if (marked.has(token) && token < written) name += " marked";
      if (token === pointed) name += " at";
      name += kind[token];
      if (cell.className !== name) cell.className = name;
    });
    for (const [state, count] of totals) count.textContent = counted[state];
    slider.value = step;
    slider.setAttribute("aria-valuetext", `step ${step + 1} of ${steps}`);
    place.setAttribute("d", `M${step} 0V100`);
    tellStep(written, read);
    tellSpans(query);
    tellToken();
    if (cells[reachable].tabIndex !== 0 || reachable > written) reach(Math.min(reachable, written));
  };

  const tellStep = (written, read) => {
    const now = $("now");
    const rows = Number.isInteger(Math.round(read * 1e6) / 1e6) ? Math.round(read) : read.toFixed(1);
    now.replaceChildren(
      make("b", "", `Step ${step + 1} of ${steps}`), " writes ", make("code", "", `\u201c${quoted(written)}\u201d`),
      ` (token ${written}). `,
      step === 0 ? `The prompt is read whole: ${plural(written, "token")}.`
        : `A head reads ${rows} of ${plural(written, "row")}${chosen === whole || groups.length === 1 ? "" : ", on this layer"}: ${percent(read / written)}.`,
    );
    if (trace.fetches.length && step > 0) {
      const [asked, fetched] = trace.fetches[step];
      now.append(` All heads asked for ${plural(asked, "row")}, of which ${fetched} came from the host.`);
    }
    const device = trace.device_bytes[step], rest = full(step);
    bytes[0].textContent = `device ${mib(device)}, ${percent(device / rest)} of a full cache`;
    bytes[1].textContent = `full cache ${mib(rest)}`;
    bytes[2].textContent = `host ${mib(trace.host_bytes[step])}`;
  };

  const items = spans.map(({ paragraph, summary }, span) => {
    const item = make("li"), button = make("button");
    const part = paragraph[0] < paragraph[1] ? paragraph : summary;
    const words = tokens.slice(...part).join("").trim();
    button.type = "button";
    button.title = words.slice(0, 400);
    const what = make("span", "what"), bar = make("span", "bar");
    bar.append(make("i"));
    button.append(make("span", "number", span + 1), what, make("span", "words", words), bar, make("span", "votes"));
    const mark = (on) => {
      marked.clear();
      if (on) for (let token = paragraph[0]; token < summary[1]; token++) marked.add(token);
      draw();
    };
    button.addEventListener("pointerenter", () => mark(true));
    button.addEventListener("pointerleave", () => mark(false));
    button.addEventListener("focus", () => mark(true));
    button.addEventListener("blur", () => mark(false));
    button.addEventListener("click", () => show(part[0], "start"));
    item.append(button);
    $("spans").append(item);
    return item;
  });
  $("paragraphs").hidden = !spans.length;
  const voted = choices.some((choice) => choice.votes);
  $("spans").classList.toggle("voteless", !voted);

  const treatment = (choice, span) => {
    if (!choice) return 0;
    const { paragraph } = spans[span];
    if (choice.zoomed.includes(span)) return paragraph[0] < paragraph[1] ? 1 : 2;
    return choice.summarised.includes(span) ? 2 : UNREAD;
  };
  const SHORT = { full: "full text", zoomed: "zoomed", summary: "summary", host: "host only", gone: "evicted" };
  const tellSpans = (query) => {
    if (!spans.length) return;
    const choice = choiceAt(step), most = Math.max(1, ...(choice?.votes ?? []));
    items.forEach((item, span) => {
      item.hidden = spans[span].summary[1] > query;
      if (item.hidden) return;
      const [, what, , bar, votes] = item.firstChild.children;
      const state = STATES[treatment(choice, span)];
      what.replaceChildren(make("span", `t ${state} i10`, SHORT[state]));
      const count = choice?.votes?.[span];
      bar.hidden = votes.hidden = !voted;
      bar.firstChild.style.width = `${100 * (count ?? 0) / most}%`;
      votes.textContent = count ?? "";
      item.firstChild.setAttribute("aria-label", `Paragraph ${span + 1}: ${SHORT[state]}${count === undefined ? "" : `, ${plural(count, "vote")}`}`);
    });
    const known = items.some((item) => !item.hidden);
    const agreed = choice?.agreeability;
    $("agreeability").textContent = !known ? "none has been summarised yet"
      : !voted ? "" : agreed === null || agreed === undefined ? "no more of them than are zoomed into: all heads agree"
        : `agreeability ${agreed.toFixed(2)}: the share of the votes that the zoomed ones have`;
  };

  const tellToken = () => {
    const readout = $("readout");
    if (pointed < 0) {
      readout.replaceChildren("Point at a token, or go through the text with the arrow keys, to see how it is held.");
      return;
    }
    const written = prompt + step, parts = [];
    readout.replaceChildren(make("b", "", `Token ${pointed}`), " ", make("code", "", `\u201c${quoted(pointed)}\u201d`));
    if (tokens[pointed] === "") parts.push("part of a character that a later token ends");
    if (pointed === written) parts.push("is being written");
    if (pointed > written) parts.push("not yet written");
    if (pointed === written - 1) parts.push("the query of this step, which reads itself");
    if (pointed < written - 1) {
      const pairs = pairsOf(chosen), state = stateOf(pointed);
      const exactly = chosen.every((group) => levels[group] % ((groups[group][1] - groups[group][0]) * trace.kv_heads) === 0) || groups.length === 1;
      const heads = (share) => `${percent(share)} of the KV heads (${exactly ? "" : "about "}${Math.round(share * pairs)} of ${pairs})`;
      parts.push(NAMES[STATES[state]]);
      if (exact[pointed] > 0) parts.push(`read by ${heads(exact[pointed])}`);
      if (coarse[pointed] > 0) parts.push(`in a mean for ${heads(coarse[pointed])}`);
      if (state === UNREAD) parts.push("read by no head");
      const span = spanOf[pointed], choice = choiceAt(step);
      if (span >= 0 && spans[span].summary[1] < written) {
        const votes = choice?.votes?.[span];
        const what = pointed < spans[span].paragraph[1] ? "paragraph" : "summary of paragraph";
        parts.push(`${what} ${span + 1}${votes === undefined ? "" : `, ${plural(votes, "vote")}`}`);
      }
    }
    readout.append(...parts.map((part) => ` \u00b7 ${part}`));
  };

  const show = (token, block) => {
    const cell = cells[token], pane = cell.closest("section");
    const top = cell.offsetTop, bottom = top + cell.offsetHeight;
    if (block === "start") pane.scrollTop = top - 12;
    else if (top < pane.scrollTop + 8) pane.scrollTop = top - .6 * pane.clientHeight;
    else if (bottom > pane.scrollTop + pane.clientHeight - 24) pane.scrollTop = bottom - pane.clientHeight + 24;
  };
  const go = (wanted) => {
    const next = Math.max(0, Math.min(steps - 1, wanted));
    if (next === step) return;
    step = next;
    draw();
    if ($("follow").checked) show(prompt + step, "nearest");
  };
  const pause = () => {
    clearInterval(timer);
    timer = 0;
    $("play").textContent = "Play";
    $("play").setAttribute("aria-pressed", "false");
  };
  const play = () => {
    if (timer) return pause();
    if (step === steps - 1) go(0);
    // An answer takes about half a minute, whatever its length.
    const wait = Math.max(30, Math.min(250, 30000 / steps)), stride = Math.max(1, Math.round(steps / 1000));
    timer = setInterval(() => {
      go(step + stride);
      if (step === steps - 1) pause();
    }, wait);
    $("play").textContent = "Pause";
    $("play").setAttribute("aria-pressed", "true");
  };

  const reach = (token) => {
    cells[reachable].tabIndex = -1;
    reachable = token;
    cells[token].tabIndex = 0;
  };
  const point = (token) => {
    if (token === pointed || token > prompt + step) return;
    const before = pointed;
    pointed = token;
    if (before >= 0) cells[before].classList.remove("at");
    if (token >= 0) cells[token].classList.add("at");
    tellToken();
  };
  const tokenOf = (event) => Number(event.target.closest?.(".tokens .t")?.dataset.token ?? -1);
  $("text").addEventListener("pointerover", (event) => point(tokenOf(event)));
  $("text").addEventListener("pointerleave", () => {
    const focused = document.activeElement.closest?.(".tokens .t");
    point(focused ? Number(focused.dataset.token) : -1);
  });
  $("text").addEventListener("focusin", (event) => {
    if (tokenOf(event) < 0) return;
    reach(tokenOf(event));
    point(reachable);
  });
  $("text").addEventListener("focusout", () => point(-1));

  slider.addEventListener("input", () => {
    pause();
    go(Number(slider.value));
  });
  $("back").addEventListener("click", () => { pause(); go(step - 1); });
  $("on").addEventListener("click", () => { pause(); go(step + 1); });
  $("play").addEventListener("click", play);
  layers.addEventListener("change", () => {
    chosen = layers.value === "all" ? whole : [Number(layers.value)];
    draw();
  });
  const pull = (event) => {
    const box = svg.getBoundingClientRect();
    pause();
    go(Math.round((event.clientX - box.left) / box.width * (steps - 1)));
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    pull(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (svg.hasPointerCapture(event.pointerId)) pull(event);
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const target = event.target, key = event.key, token = tokenOf(event);
    const way = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (key === " " && !target.closest("button, select, input[type=checkbox]")) {
      play();
    } else if (token >= 0 && (way || key === "Home" || key === "End")) {
      const next = way ? token + way : key === "Home" ? 0 : prompt + step;
      cells[Math.max(0, Math.min(prompt + step, next))].focus();
    } else if (target !== slider && !target.closest("select") && (way || key === "Home" || key === "End")) {
      pause();
      go(way ? step + way : key === "Home" ? 0 : steps - 1);
    } else {
      return;
    }
    event.preventDefault();
  });

  document.querySelector("main").hidden = false;
  go(steps - 1);
})();
