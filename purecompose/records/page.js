// The curves of the page: one figure per panel, drawn as SVG from the numbers in the element #numbers.
"use strict";
(() => {
  const { runs, panels, axes, smoothing } = JSON.parse(document.getElementById("numbers").textContent);
  const root = document.getElementById("curves"), HEIGHT = 210, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 24;
  const view = { axis: "batch", smoothing, hidden: new Set(), log: new Set(panels.filter(p => p.log)) };
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const drawings = [];

  function make(tag, attributes = {}, ...children) {
    const isSvg = ["svg", "path", "line", "text", "circle", "g"].includes(tag);
    const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  const text = (value, panel) => panel.share ? `${+(100 * value).toFixed(2)}%`
    : Math.abs(value) >= 1e4 ? compact.format(value) : `${+value.toPrecision(4)}`;
  const color = i => i < 7 ? `var(--run${i})` : `hsl(${(i * 137.5) % 360} 55% var(--lightness))`;
  // Of several runs each has a color and each column its dashes; the columns of a single one have colors.
  const style = series => runs.length > 1
    ? `--color: ${series.run < 0 ? "var(--text)" : color(series.run)}; --dashes: ${["none", "5 3", "2 2", "8 2 2 2"][series.column % 4]}`
    : `--color: ${color(series.column)}`;
  const swatch = () => make("svg", { class: "swatch", viewBox: "0 0 20 4", "aria-hidden": true },
    make("line", { class: "curve", x1: 0, x2: 20, y1: 2, y2: 2 }));
  const isShown = (panel, series) => !view.hidden.has(`run ${series.run}`)
    && !view.hidden.has(panel.columns[series.column]);

  // Return the place on the chosen axis of a batch, between those that are known of the run; NaN without any.
  function place(run, batch) {
    const { batch: known, [view.axis]: places } = runs[run].axes;
    if (view.axis === "batch" || !places) return places ? batch : NaN;
    let low = 0, high = known.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (known[middle] <= batch) low = middle; else high = middle;
    }
    return places[low] + (batch - known[low]) / (known[high] - known[low] || 1) * (places[high] - places[low]);
  }

  // Return the means of the numbers in a window around each point. Sums of parts would lose digits after large numbers.
  function smoothed(xs, ys, width) {
    let first = 0;
    return xs.map((x, i) => {
      while (xs[first] < x - width / 2) first++;
      let sum = 0, count = 0;
      for (let j = first; j < xs.length && xs[j] <= x + width / 2; j++) if (ys[j] !== null) { sum += ys[j]; count++; }
      return ys[i] === null ? null : sum / count;
    });
  }

  function ticks(low, high, count, isLog) {
    if (isLog && high > 5 * low) {
      const found = [], far = Math.log10(high / low);
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += Math.ceil(far / 8))
        for (const factor of far < 1 ? [1, 2, 3, 5, 7] : far < 3 ? [1, 3] : [1]) found.push(factor * 10 ** power);
      return found.filter(one => one >= low && one <= high);
    }
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw), found = [];
    for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
    return found;
  }

  // Return a path through points; numbers that are missing leave gaps.
  function path(xs, ys, fx, fy) {
    let isOpen = false, found = "";
    for (let i = 0; i < xs.length; i++) {
      const y = ys[i] === null ? NaN : fy(ys[i]);
      if (Number.isFinite(y)) found += `${isOpen ? "L" : "M"}${fx(xs[i]).toFixed(1)},${y.toFixed(1)}`;
      isOpen = Number.isFinite(y);
    }
    return found;
  }

  // Return the outline of what lies between two lines; numbers that are missing leave gaps.
  function band(xs, low, high, fx, fy) {
    let first = 0, found = "";
    const point = (i, ys) => `${fx(xs[i]).toFixed(1)},${fy(ys[i]).toFixed(1)}`;
    for (let i = 0; i <= xs.length; i++) if (i === xs.length || low[i] === null) {
      const part = [...xs.keys()].slice(first, i);
      if (part.length) found += `M${[...part.map(j => point(j, high)), ...part.reverse().map(j => point(j, low))].join("L")}Z`;
      first = i + 1;
    }
    return found;
  }

  function lines(panel, width) {
    return panel.series.filter(series => isShown(panel, series)).map(series => {
      const x = series.x.map(batch => place(series.run, batch));
      const isSmooth = series.noisy && width > 0;
      return { series, x, raw: series.y, y: isSmooth ? smoothed(x, series.y, width) : series.y, isSmooth };
    }).filter(line => Number.isFinite(line.x[0]));
  }

  function domain(panel, drawn, isLog) {
    const known = all => all.flat().filter(y => y !== null && (y > 0 || !isLog));
    // Of the bands without the outermost numbers, as of a single member that has diverged.
    const bands = known(drawn.flatMap(({ series }) => series.low ? [series.low, series.high] : [])).sort((a, b) => a - b);
    const cut = Math.ceil(bands.length / 100), all = [...known(drawn.map(line => line.y)), ...bands.slice(cut, -cut || 1)];
    if (!all.length) return [isLog ? 0.1 : 0, 1];
    let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
    if (panel.kind === "speed" && !isLog) low = 0;
    if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
    const margin = (high - low) * 0.04;
    return isLog ? [low / 1.05, high * 1.05] : [low && low - margin, high + margin];
  }

  function draw({ panel, svg }) {
    const width = Math.max(svg.parentNode.clientWidth, 240), isLog = view.log.has(panel), parts = [];
    const shown = panels.flatMap(one => one.series.filter(series => isShown(one, series)));
    const end = Math.max(1e-9, ...shown.map(({ run, x }) => place(run, x[x.length - 1])).filter(Number.isFinite));
    const drawn = lines(panel, view.smoothing / 100 * end), [low, high] = domain(panel, drawn, isLog);
    const scale = isLog ? Math.log : y => y, share = y => (scale(y) - scale(low)) / (scale(high) - scale(low));
    const fx = x => LEFT + x / end * (width - LEFT - RIGHT), fy = y => HEIGHT - BOTTOM - share(y) * (HEIGHT - TOP - BOTTOM);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const y of ticks(low, high, 5, isLog)) parts.push(
      make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: fy(y), y2: fy(y) }),
      make("text", { x: LEFT - 6, y: fy(y) + 4, "text-anchor": "end" }, text(y, panel)));
    for (const x of ticks(0, end, width / 90, false)) parts.push(
      make("text", { x: fx(x), y: HEIGHT - 7, "text-anchor": "middle" }, text(x, {})));
    const plot = make("svg", { x: LEFT - 3, width: width - LEFT, height: HEIGHT - BOTTOM, viewBox: `${LEFT - 3} 0 ${width - LEFT} ${HEIGHT - BOTTOM}` });
    for (const { series, x, raw, y, isSmooth } of drawn) {
      const group = make("g", { style: style(series) });
      if (series.low) group.append(make("path", { class: "band",
        d: band(x, series.low, series.high, fx, y => fy(isLog ? Math.max(y, low) : y)) }));
      else if (isSmooth) group.append(make("path", { class: "raw", d: path(x, raw, fx, fy) }));
      group.append(make("path", { class: "curve", d: path(x, y, fx, fy) }));
      if (x.length <= 40) for (let i = 0; i < x.length; i++) if (y[i] !== null && (y[i] > 0 || !isLog))
        group.append(make("circle", { cx: fx(x[i]), cy: fy(y[i]), r: 2.2 }));
      plot.append(group);
    }
    runs.forEach((run, i) => { if (!view.hidden.has(`run ${i}`)) for (const batch of run.resumed) {
      const x = fx(place(i, batch));
      if (Number.isFinite(x)) plot.append(make("line", { class: "resumed", style: runs.length > 1 ? `--color: ${color(i)}` : "", x1: x, x2: x, y1: 0, y2: HEIGHT - BOTTOM }));
    } });
    svg.replaceChildren(...parts, plot);
    return { drawn, end, width, fx, fy };
  }

  // Show the values near a place x of a panel's axis.
  function read(drawing, at) {
    const { panel, svg, box } = drawing, { drawn, end, width, fx, fy } = drawing.now;
    svg.querySelectorAll(".pointer").forEach(one => one.remove());
    const rows = [], nearest = new Map();
    for (const line of drawn) {
      const i = line.x.reduce((best, x, j) => Math.abs(x - at) < Math.abs(line.x[best] - at) ? j : best, 0);
      const key = `${line.series.run} ${line.series.column}`, far = Math.abs(line.x[i] - at);
      const reach = end / 50 + (line.x[line.x.length - 1] - line.x[0]) / line.x.length;
      if (line.y[i] !== null && far < (nearest.get(key)?.far ?? reach)) nearest.set(key, { line, i, far });
    }
    if (!nearest.size) return hide(drawing);
    for (const { line: { series, x, raw, y, isSmooth }, i } of nearest.values()) {
      const names = [...runs.length > 1 ? [runs[series.run].name] : [], ...panel.columns.length > 1 || runs.length === 1 ? [panel.columns[series.column]] : []];
      const range = series.low && raw[i] !== null ? ` (${text(series.low[i], panel)} to ${text(series.high[i], panel)})` : "";
      rows.push(make("div", { style: style(series) }, swatch(), `${names.join(" ")} `,
        make("b", {}, text(raw[i], panel)), `${range}${isSmooth ? `, mean ${text(y[i], panel)}` : ""}`));
      svg.append(make("circle", { class: "pointer", style: style(series), cx: fx(x[i]), cy: fy(y[i]), r: 4 }));
    }
    const x = fx(at), unit = Math.abs(at) < 1000 && view.axis !== "batch" ? +at.toFixed(2) : Math.round(at).toLocaleString("en");
    svg.append(make("line", { class: "pointer", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    box.replaceChildren(make("div", {}, `${axes[view.axis]} ${unit}`), ...rows);
    box.hidden = false;
    box.style.left = `${Math.max(0, Math.min(x + 12, width - box.offsetWidth))}px`;
    if (x + 12 + box.offsetWidth > width && x - 12 > box.offsetWidth) box.style.left = `${x - 12 - box.offsetWidth}px`;
    drawing.at = at;
  }

  function hide(drawing) {
    drawing.box.hidden = true;
    drawing.at = undefined;
    drawing.svg.querySelectorAll(".pointer").forEach(one => one.remove());
  }

  function redraw() {
    for (const drawing of drawings) { hide(drawing); drawing.now = draw(drawing); }
  }

  function toggle(key, look, ...words) {
    return make("button", { type: "button", "aria-pressed": !view.hidden.has(key), style: look, onclick: event => {
      const shown = view.hidden.delete(key) || !view.hidden.add(key);
      document.querySelectorAll("button[data-key]").forEach(one => one.dataset.key === key && one.setAttribute("aria-pressed", shown));
      redraw();
    }, "data-key": key }, swatch(), ...words);
  }

  function figure(panel) {
    const keys = panel.columns.length > 1 ? panel.columns.map((name, i) => toggle(name, style({ run: -1, column: i }), name)) : [];
    const isLog = make("input", { type: "checkbox", onchange: event => {
      view.log[event.target.checked ? "add" : "delete"](panel);
      redraw();
    } });
    isLog.checked = view.log.has(panel);
    const svg = make("svg", { role: "img", tabindex: 0, "aria-label": `Curves: ${panel.title}. The arrow keys read the values.` });
    const box = make("div", { class: "values", role: "status", hidden: "" }), drawing = { panel, svg, box };
    const caption = make("figcaption", {}, make("b", {}, panel.title), ...keys, make("label", { class: "log" }, isLog, "log"));
    if (panel.bad) caption.append(make("span", { class: "bad" }, panel.bad));
    svg.addEventListener("pointermove", event => {
      const { left } = svg.getBoundingClientRect(), { end, width } = drawing.now;
      const at = (event.clientX - left - LEFT) / (width - LEFT - RIGHT) * end;
      if (at >= 0 && at <= end) read(drawing, at); else hide(drawing);
    });
    for (const event of ["pointerleave", "blur"]) svg.addEventListener(event, () => hide(drawing));
    svg.addEventListener("keydown", event => {
      const step = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key] * drawing.now.end;
      if (step) { event.preventDefault(); read(drawing, Math.min(Math.max((drawing.at ?? drawing.now.end / 2) + step, 0), drawing.now.end)); }
    });
    drawings.push(drawing);
    return make("figure", {}, caption, make("div", { class: "plot" }, svg, box));
  }

  const choice = make("select", { onchange: event => { view.axis = event.target.value; redraw(); } },
    ...Object.entries(axes).map(([name, words]) => make("option", { value: name }, words)));
  const shown = make("output", {}, `${view.smoothing}%`);
  const slider = make("input", { type: "range", min: 0, max: 20, step: 0.5, value: view.smoothing, oninput: event => {
    view.smoothing = +event.target.value;
    shown.textContent = `${view.smoothing}%`;
    redraw();
  } });
  root.replaceChildren(
    make("div", { class: "controls" }, make("label", {}, "axis ", choice), make("label", {}, "smoothing ", slider, shown)),
    ...runs.length > 1 ? [make("div", { class: "legend" }, ...runs.map((run, i) => toggle(`run ${i}`, `--color: ${color(i)}`, run.name)))] : [],
    make("div", { class: "panels" }, ...panels.map(figure)));
  redraw();
  new ResizeObserver(redraw).observe(root);
})();
