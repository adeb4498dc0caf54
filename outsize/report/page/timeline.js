// Draws the timeline and the memory curve from the JSON in #data. All text goes through
// textContent or fillText, never through innerHTML: names come from models.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const AXIS = 26, MEMORY = 250, RIGHT = 14, GAP = 10, PAD = 4;
const STACK = ["parameters", "master", "optimizer", "gradients", "data", "activations", "workspace"];
const traces = data.traces;
const two = traces.length === 2;
const BAR = Math.max(two ? 15 : 18, Math.min(28, Math.floor(300 / Math.max(1, data.lanes.length * traces.length))));
const span = Math.max(1e-9, ...traces.map((t) => t.end.reduce((a, b) => Math.max(a, b), 0)));
const view = { from: 0, to: span };
let hover = null, pointer = null, single = null, theme = {}, gutter = 100, width = 800, pending = false;

// ---- units ---------------------------------------------------------------------------------
const digits = (v, n) => v.toLocaleString("en-US", { minimumFractionDigits: n, maximumFractionDigits: n });
const places = (v) => (Math.abs(v) < 9.995 ? 2 : Math.abs(v) < 99.95 ? 1 : 0);
function seconds(v) {
  if (v === 0) return "0 s";
  const [scale, unit] = Math.abs(v) >= 0.9995 ? [1, "s"] : Math.abs(v) >= 0.9995e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return digits(v * scale, places(v * scale)) + " " + unit;
}
const exactly = (v) => digits(v * 1e3, 3) + " ms";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(v) {
  let unit = 0;
  while (Math.abs(v) >= 1023.5 && unit < 4) { v /= 1024; unit += 1; }
  return (unit ? digits(v, places(v)) : digits(v, 0)) + " " + UNITS[unit];
}
function percent(now, before) {
  const part = (now / before - 1) * 100;
  return (part < 0 ? "−" : "+") + digits(Math.abs(part), 1) + "%";
}
function step(range, count) {  // 1, 2 or 5 times a power of ten, about count of them in range
  const raw = range / count, power = 10 ** Math.floor(Math.log10(raw)), lead = raw / power;
  return power * (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
}

// ---- colours -------------------------------------------------------------------------------
const colours = new Map();
function colour(name) {  // the theme's, or for a name it does not know a hue of its own
  if (!colours.has(name)) {
    const known = /^\w+$/.test(name) ? getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() : "";
    let hash = 7;
    for (const c of name) hash = (hash * 31 + c.codePointAt(0)) % 3600;
    colours.set(name, known || `hsl(${hash / 10} 38% ${theme.dark ? 50 : 66}%)`);
  }
  return colours.get(name);
}
const lineInk = (of) => (of === "budget" ? theme.alarm : of === "other" ? theme.soft : theme.ink);
function retheme() {
  const style = getComputedStyle(document.documentElement);
  theme = { dark: matchMedia("(prefers-color-scheme: dark)").matches, font: getComputedStyle(document.body).fontFamily };
  for (const k of ["page", "card", "line", "grid", "band", "ink", "soft", "faint", "accent", "alarm"]) theme[k] = style.getPropertyValue("--" + k).trim();
  colours.clear();
  for (const s of document.querySelectorAll(".swatch[data-kind]")) s.style.background = colour(s.dataset.kind);
  for (const s of document.querySelectorAll(".swatch.line")) s.style.borderColor = lineInk(s.dataset.of);
  draw();
}

// ---- rows: what lies where -----------------------------------------------------------------
// A row is one lane of one worker; inside it one bar a trace. first[i] is the latest end up to i,
// so a binary search finds the first visible action even where actions overlap.
const rows = data.lanes.map(([worker, lane]) => ({ worker, lane, parts: traces.map(() => []), ends: [], y: 0 }));
traces.forEach((t, s) => t.lane.forEach((row, i) => rows[row].parts[s].push(i)));
let tall = PAD;
rows.forEach((row, r) => {
  row.ends = row.parts.map((part, s) => { let m = -1; return part.map((i) => (m = Math.max(m, traces[s].end[i]))); });
  row.first = r === 0 || rows[r - 1].worker !== row.worker;
  if (r && row.first) tall += GAP; else if (r) tall += PAD;
  row.y = tall;
  tall += traces.length * (BAR + 1);
});
tall += PAD;
const twin = new Map();  // the same action in the other trace
const key = (s, i) => [traces[s].lane[i], traces[s].kind[i], traces[s].stage[i], traces[s].microbatch[i]].join(" ");
if (two) {
  const seen = [new Map(), new Map()];
  traces.forEach((t, s) => t.lane.forEach((_, i) => {
    const k = key(s, i), n = (seen[s].get(k) || 0);
    seen[s].set(k, n + 1);
    twin.set(s + " " + k + " " + n, i);
    twin.set(s + "#" + i, (1 - s) + " " + k + " " + n);
  }));
}
const other = (s, i) => (two ? twin.get(twin.get(s + "#" + i)) : undefined);
function name(s, i) {
  const t = traces[s];
  return data.kinds[t.kind[i]] + (t.stage[i] < 0 ? "" : " s" + t.stage[i]) + (t.microbatch[i] < 0 ? "" : " m" + t.microbatch[i]);
}
function atLeast(list, value) {  // first index with list[index] >= value
  let low = 0, high = list.length;
  while (low < high) { const mid = (low + high) >> 1; if (list[mid] < value) low = mid + 1; else high = mid; }
  return low;
}

// ---- memory: one curve a (trace, worker, tier) -----------------------------------------------
const tiers = [...new Set([...data.keys.map((k) => k.split("/")[0]), ...(traces.some((t) => t.peak.some((p) => p)) ? ["device"] : [])])]
  .sort((a, b) => ["device", "host", "disk"].indexOf(a) - ["device", "host", "disk"].indexOf(b));
const workers = [...new Set(data.lanes.map(([w]) => w))];
const made = new Map();
function curve(s, worker, tier) {
  const id = s + " " + worker + " " + tier;
  if (made.has(id)) return made.get(id);
  const t = traces[s], mine = [], kinds = [];
  data.keys.forEach((k, n) => { const cut = k.indexOf("/"); if (k.slice(0, cut) === tier) kinds.push({ name: k.slice(cut + 1), n }); });
  const rank = (k) => (STACK.indexOf(k.name) + 1 || STACK.length + 1);
  kinds.sort((a, b) => rank(a) - rank(b));
  t.lane.forEach((row, i) => { if (rows[row].worker === worker) mine.push(i); });
  const told = data.keys.length ? mine.filter((i) => t.live[0][i] >= 0).sort((a, b) => t.end[a] - t.end[b]) : [];
  const sum = told.map((i) => kinds.reduce((all, k) => all + t.live[k.n][i], 0));
  const c = { t, kinds, told, sum, when: told.map((i) => t.end[i]), peaks: tier === "device" ? mine.filter((i) => t.peak[i]) : [], top: 0, at: 0, by: -1 };
  told.forEach((i, n) => { if (sum[n] > c.top) { c.top = sum[n]; c.at = t.end[i]; c.by = i; } });
  for (const i of c.peaks) if (t.peak[i] > c.top || (t.peak[i] === c.top && c.by < 0)) { c.top = t.peak[i]; c.at = (t.start[i] + t.end[i]) / 2; c.by = i; }
  made.set(id, c);
  return c;
}
function options(select, values, texts, chosen) {
  values.forEach((v, n) => { const o = document.createElement("option"); o.value = v; o.textContent = texts[n]; select.append(o); });
  select.value = chosen;
  select.hidden = values.length < 2;
  select.addEventListener("change", () => { keys(); draw(); });
}
options($("source"), traces.map((_, s) => s), traces.map((t) => t.source), traces.length - 1);
options($("tier"), tiers, tiers.map((t) => t + " memory"), tiers[0]);
const fullest = workers.reduce((best, w) => (tiers.length && curve(traces.length - 1, w, tiers[0]).top > curve(traces.length - 1, best, tiers[0]).top ? w : best), workers[0]);
options($("worker"), workers, workers.map((w) => "worker " + w + (w === fullest && workers.length > 1 ? " (highest)" : "")), fullest);
const chosen = (s = Number($("source").value)) => curve(s, Number($("worker").value), $("tier").value);

// ---- legends ---------------------------------------------------------------------------------
function swatch(kind, extra) {
  const i = document.createElement("i");
  i.className = "swatch" + (extra || "");
  if (kind) { i.dataset.kind = kind; i.style.background = colour(kind); }
  return i;
}
for (const kind of data.kinds) {
  const b = document.createElement("button");
  b.append(swatch(kind), kind);
  b.setAttribute("aria-pressed", "false");
  b.addEventListener("click", () => {
    single = single === kind ? null : kind;
    for (const other of $("actions").children) other.setAttribute("aria-pressed", String(other === b && single !== null));
    draw();
  });
  $("actions").append(b);
}
function keys() {
  const line = (of, text, extra) => { const l = swatch("", " line" + extra); l.dataset.of = of; l.style.borderColor = lineInk(of); return [l, text]; };
  const c = tiers.length ? chosen() : { kinds: [], peaks: [] };
  const all = [...c.kinds].reverse().map((k) => [swatch(k.name), k.name]);
  if (c.peaks.length) all.push(line("peak", "peak while an action runs", ""));
  if (two && tiers.length) all.push(line("other", traces[1 - Number($("source").value)].source + " peak", " dashed"));
  if (data.budget && $("tier").value === "device") all.push(line("budget", "budget", " dashed"));
  $("bytes").replaceChildren(...all.map((parts) => { const s = document.createElement("span"); s.className = "key"; s.append(...parts); return s; }));
}
if (!tiers.length) { $("memorybar").hidden = true; $("memorybar").style.display = "none"; $("memory").hidden = true; }

// ---- drawing ---------------------------------------------------------------------------------
function surface(canvas, height) {
  const ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = "12px " + theme.font;
  g.textBaseline = "middle";
  return g;
}
const x = (t) => gutter + ((t - view.from) / (view.to - view.from)) * (width - gutter - RIGHT);
const timeAt = (px) => view.from + ((px - gutter) / (width - gutter - RIGHT)) * (view.to - view.from);
function shorten(g, text, room) {
  if (g.measureText(text).width <= room) return text;
  while (text && g.measureText(text + "…").width > room) text = text.slice(0, -1);
  return text + "…";
}
function ticks() {
  const every = step(view.to - view.from, Math.max(3, (width - gutter) / 110)), all = [];
  for (let n = Math.ceil(view.from / every - 1e-9); n * every <= view.to + every * 1e-9; n += 1) all.push(n * every + 0);  // + 0: no "-0"
  return [all, every];
}
function drawAxis() {
  const g = surface($("axis"), AXIS), [all, every] = ticks();
  const [scale, unit] = every >= 0.1 ? [1, "s"] : every >= 1e-4 ? [1e3, "ms"] : [1e6, "µs"];
  const n = Math.min(6, Math.max(0, -Math.floor(Math.log10(every * scale) + 1e-9)));
  g.fillStyle = theme.soft;
  g.textAlign = "center";
  for (const t of all) {
    const text = digits(t * scale, n) + " " + unit, half = g.measureText(text).width / 2;
    g.fillText(text, Math.min(Math.max(x(t), gutter + half - 8), width - half), AXIS / 2 - 2);
    g.fillRect(x(t) - 0.5, AXIS - 5, 1, 5);
  }
}
function grid(g, height) {
  g.fillStyle = theme.grid;
  for (const t of ticks()[0]) g.fillRect(x(t) - 0.5, 0, 1, height);
}
function drawLanes() {
  const height = Math.min(tall, $("scroll").clientHeight || tall), g = surface($("lanes"), height), scroll = $("scroll").scrollTop;
  g.save();
  g.translate(0, -scroll);
  for (const row of rows) {
    const h = traces.length * (BAR + 1);
    if (row.y + h < scroll || row.y > scroll + height) continue;
    g.fillStyle = theme.band;
    g.fillRect(gutter, row.y - 1, width - gutter - RIGHT, h + 1);
  }
  g.restore();
  grid(g, height);
  g.translate(0, -scroll);
  for (const row of rows) {
    const h = traces.length * (BAR + 1);
    if (row.y + h < scroll || row.y > scroll + height) continue;
    drawGutter(g, row, h);
    g.save();
    g.beginPath();
    g.rect(gutter, row.y - 2, width - gutter - RIGHT + 1, h + 4);
    g.clip();
    row.parts.forEach((part, s) => drawBars(g, row, part, s));
    g.restore();
  }
  cross(g, scroll, height);
}
let columns = [0, 0, 0];  // width of the labels: worker, lane, source
function measure() {
  const g = $("axis").getContext("2d");
  g.font = "12px " + theme.font;
  const widest = (texts, most) => Math.min(most, Math.max(0, ...texts.map((t) => g.measureText(t).width)));
  columns = [workers.length > 1 ? widest(workers.map((w) => "worker " + w), 110) + 14 : 0, widest(rows.map((r) => r.lane), 120) + 14, two ? 58 : 0];
  gutter = Math.max(84, Math.ceil(columns[0] + columns[1] + columns[2]));
}
function drawGutter(g, row, h) {
  g.textAlign = "left";
  if (row.first && workers.length > 1) {
    g.fillStyle = theme.ink;
    g.fillText(shorten(g, "worker " + row.worker, columns[0] - 8), 0, row.y + h / 2);
  }
  g.fillStyle = theme.soft;
  g.fillText(shorten(g, row.lane, columns[1] - 8), columns[0], row.y + h / 2);
  if (!two) return;
  g.font = "10.5px " + theme.font;
  g.fillStyle = theme.faint;
  traces.forEach((t, s) => g.fillText(t.source, columns[0] + columns[1], row.y + s * (BAR + 1) + BAR / 2 + 0.5));
  g.font = "12px " + theme.font;
}
function drawBars(g, row, part, s) {
  const t = traces[s], y = row.y + s * (BAR + 1), faded = two && s === 0;
  let painted = -1;
  for (let n = atLeast(row.ends[s], view.from); n < part.length; n += 1) {
    const i = part[n];
    if (t.start[i] > view.to) break;
    if (t.end[i] < view.from) continue;
    const kind = data.kinds[t.kind[i]], off = single !== null && kind !== single;
    const left = Math.max(x(t.start[i]), gutter - 4), right = Math.min(x(t.end[i]), width + 4), wide = right - left;
    if (wide < 1) {  // many of them share a pixel: paint each pixel once
      const pixel = Math.floor(left);
      if (pixel === painted && !(single !== null && !off)) continue;
      painted = pixel;
    }
    g.globalAlpha = off ? 0.13 : faded ? 0.62 : 1;
    g.fillStyle = colour(kind);
    g.beginPath();
    if (wide > 6) g.roundRect(left + 0.5, y, wide - 1, BAR, 2.5); else g.rect(left, y, Math.max(wide > 2 ? wide - 0.5 : wide, 1), BAR);
    g.fill();
    if (hover && (hover.i === i && hover.s === s || hover.s !== s && other(hover.s, hover.i) === i)) {
      g.globalAlpha = 1;
      g.strokeStyle = theme.ink;
      g.lineWidth = 1.5;
      g.stroke();
    }
    if (wide > 16) label(g, s, i, left, wide, y, off);
  }
  g.globalAlpha = 1;
}
function label(g, s, i, left, wide, y, off) {
  const t = traces[s], short = t.microbatch[i] < 0 ? [] : ["m" + t.microbatch[i]];
  if (t.stage[i] >= 0) short.unshift(("s" + t.stage[i] + " " + (short[0] || "")).trim());
  g.globalAlpha = off ? 0.35 : 1;
  g.font = "11px " + theme.font;
  g.textAlign = "center";
  g.fillStyle = theme.dark ? (two && s === 0 ? "#e8e9ec" : "#0f1114") : "#1d2126";
  const kind = data.kinds[t.kind[i]].toLowerCase().replace(/_/g, " "), tail = short[0] ? " " + short[0] : "";
  for (const text of [kind + tail, ...short, ...(short.length ? [] : [kind])]) {
    if (g.measureText(text).width <= wide - 8) { g.fillText(text, left + wide / 2, y + BAR / 2 + 0.5); break; }
  }
  g.font = "12px " + theme.font;
}
function cross(g, top, height) {
  if (pointer === null || pointer < gutter || pointer > width - RIGHT) return;
  g.fillStyle = theme.faint;
  g.globalAlpha = 0.6;
  g.fillRect(Math.round(pointer) - 0.5, top, 1, height);
  g.globalAlpha = 1;
}
function drawMemory() {
  if (!tiers.length) return;
  const g = surface($("memory"), MEMORY), c = chosen(), rest = two ? chosen(1 - Number($("source").value)) : null;
  const budget = $("tier").value === "device" ? data.budget : null;
  let most = Math.max(c.top, rest ? rest.top : 0, 1);
  const near = budget && budget < most * 2.5;
  if (near) most = Math.max(most, budget);
  const top = most * 1.13, foot = MEMORY - 6, head = 12, yOf = (v) => foot - (v / top) * (foot - head);
  let unit = 0;
  while (most / 1024 ** unit >= 1023.5 && unit < 4) unit += 1;
  const every = step(top / 1024 ** unit, 4), n = Math.max(0, -Math.floor(Math.log10(every) + 1e-9));
  g.textAlign = "right";
  for (let v = 0; v <= top / 1024 ** unit; v += every) {
    const y = yOf(v * 1024 ** unit);
    g.fillStyle = theme.grid;
    g.fillRect(gutter, Math.round(y) - 0.5, width - gutter - RIGHT, 1);
    g.fillStyle = theme.soft;
    g.fillText(v ? digits(v, n) + " " + UNITS[unit] : "0", gutter - 10, Math.min(y, foot - 4));
  }
  g.save();
  g.beginPath();
  g.rect(gutter, 0, width - gutter - RIGHT, MEMORY);
  g.clip();
  grid(g, foot);
  drawStack(g, c, yOf);
  if (rest) envelope(g, rest, yOf, [5, 4], theme.soft, 1.2);
  if (c.peaks.length) envelope(g, c, yOf, [], theme.ink, 1.4);
  if (near) {
    g.strokeStyle = theme.alarm;
    g.setLineDash([7, 4]);
    g.lineWidth = 1.4;
    g.beginPath();
    g.moveTo(gutter, yOf(budget));
    g.lineTo(width, yOf(budget));
    g.stroke();
    g.setLineDash([]);
  }
  g.restore();
  const gap = yOf(c.top) - yOf(budget), clash = near && gap > -12 && gap < 20;  // its label would lie on the line
  if (budget) note(g, near ? "budget " + bytes(budget) : "budget " + bytes(budget) + ", above this scale", width - RIGHT - 4, near ? yOf(budget) - 9 : head, "right", theme.alarm);
  markPeak(g, c, yOf, clash);
  cross(g, 0, foot);
}
function note(g, text, px, py, align, ink) {  // text on a small plate, readable over anything
  g.textAlign = align;
  const w = g.measureText(text).width, left = align === "right" ? px - w : px;
  g.fillStyle = theme.card;
  g.globalAlpha = 0.82;
  g.fillRect(left - 4, py - 8, w + 8, 16);
  g.globalAlpha = 1;
  g.fillStyle = ink;
  g.fillText(text, px, py);
}
function drawStack(g, c, yOf) {
  if (c.when.length && c.peaks.length) {  // before the first word on kinds only the peak is known
    g.fillStyle = theme.grid;
    const height = Math.max(...c.peaks.filter((i) => c.t.start[i] < c.when[0]).map((i) => c.t.peak[i]), 0);
    g.fillRect(x(0), yOf(height), x(c.when[0]) - x(0), yOf(0) - yOf(height));
  }
  const from = Math.max(0, atLeast(c.when, view.from) - 1), to = Math.min(c.told.length, atLeast(c.when, view.to) + 1);
  if (from >= to) return;
  const base = new Float64Array(to - from);
  for (const k of c.kinds) {
    const next = base.map((b, n) => b + c.t.live[k.n][c.told[from + n]]);
    const until = (n) => x(from + n + 1 < c.when.length ? c.when[from + n + 1] : span_of(c.t));
    g.beginPath();
    for (let n = 0; n < next.length; n += 1) { const y = yOf(next[n]); g.lineTo(x(c.when[from + n]), y); g.lineTo(until(n), y); }
    for (let n = next.length - 1; n >= 0; n -= 1) { const y = yOf(base[n]); g.lineTo(until(n), y); g.lineTo(x(c.when[from + n]), y); }
    g.closePath();
    g.fillStyle = colour(k.name);
    g.fill();
    base.set(next);
  }
}
const span_of = (t) => t.end.reduce((a, b) => Math.max(a, b), 0);
function envelope(g, c, yOf, dash, ink, weight) {  // highest bytes in each column of pixels
  const seen = atLeast(c.when, view.to) - atLeast(c.when, view.from), room = width - gutter - RIGHT;
  const wide = seen * 8 < room ? 1 : 6;  // a crowd of narrow steps would be a black band
  const plot = Math.ceil(room / wide) + 1, high = new Float64Array(plot);
  const put = (a, b, v) => {
    if (b < view.from || a > view.to) return;
    const last = Math.min(plot - 1, Math.floor((x(b) - gutter) / wide));
    for (let p = Math.max(0, Math.floor((x(a) - gutter) / wide)); p <= last; p += 1) if (v > high[p]) high[p] = v;
  };
  for (const i of c.peaks) put(c.t.start[i], c.t.end[i], c.t.peak[i]);
  c.told.forEach((_, n) => put(c.when[n], n + 1 < c.when.length ? c.when[n + 1] : c.when[n], c.sum[n]));
  g.strokeStyle = ink;
  g.lineWidth = weight;
  g.setLineDash(dash);
  g.beginPath();
  for (let p = 0; p < plot; p += 1) {
    if (!high[p]) continue;
    const left = gutter + p * wide, y = yOf(high[p]);
    if (p === 0 || !high[p - 1]) g.moveTo(left, y);
    g.lineTo(left, y);
    g.lineTo(left + wide, y);
  }
  g.stroke();
  g.setLineDash([]);
}
function markPeak(g, c, yOf, clash) {
  if (c.by < 0 || c.at < view.from || c.at > view.to) return;
  const px = x(c.at), py = yOf(c.top), text = "peak " + bytes(c.top) + " in " + name(traces.indexOf(c.t), c.by);
  g.fillStyle = theme.ink;
  g.strokeStyle = theme.card;
  g.lineWidth = 2;
  g.beginPath();
  g.arc(px, py, 4, 0, 7);
  g.fill();
  g.stroke();
  const fits = px + 16 + g.measureText(text).width < width - RIGHT - (clash ? 190 : 0);
  note(g, text, fits ? px + 11 : px - 11, clash ? py + 12 : py - 9, fits ? "left" : "right", theme.ink);
}
function draw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    drawAxis();
    drawLanes();
    drawMemory();
    document.body.dataset.drawn = "yes";
  });
}

// ---- tooltip -----------------------------------------------------------------------------------
function tell(title, where, lines, event) {
  const tip = $("tip"), head = document.createElement("b"), sub = document.createElement("div"), table = document.createElement("table");
  head.textContent = title;
  sub.className = "where";
  sub.textContent = where;
  for (const [left, right, kind, rule] of lines) {
    const tr = table.insertRow(), a = tr.insertCell(), b = tr.insertCell();
    if (kind) a.append(swatch(kind));
    a.append(left);
    b.textContent = right;
    if (rule) tr.className = "rule";
  }
  tip.replaceChildren(head, sub, table);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, event.clientX + 18 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 18) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 16, innerHeight - box.height - 8)) + "px";
}
function tellAction(s, i, event) {
  const t = traces[s], row = rows[t.lane[i]], lasted = t.end[i] - t.start[i], lines = [["start", exactly(t.start[i])], ["duration", exactly(lasted)]];
  const j = other(s, i);
  if (j !== undefined) {
    const o = traces[1 - s], there = o.end[j] - o.start[j], pair = s === 1 ? [lasted, there] : [there, lasted];
    lines.push([o.source, exactly(there)]);
    if (pair[1] > 0) lines.push(["measured over foretold", percent(...pair)]);
  }
  if (t.peak[i]) lines.push(["peak while it ran", bytes(t.peak[i]), "", true]);
  data.keys.forEach((k, n) => { if (t.live[n][i] > 0) lines.push([k.replace("/", " "), bytes(t.live[n][i]), k.slice(k.indexOf("/") + 1), n === 0 && !t.peak[i]]); });
  tell(name(s, i), `${t.source} · worker ${row.worker} · ${row.lane}`, lines, event);
}
function tellMemory(event, px) {
  const c = chosen(), when = timeAt(px), n = atLeast(c.when, when + 1e-12) - 1;
  if (n < 0 || px < gutter) { $("tip").hidden = true; return; }
  const lines = [...c.kinds].reverse().map((k) => [k.name, bytes(c.t.live[k.n][c.told[n]]), k.name]);
  lines.push(["together", bytes(c.sum[n]), "", true]);
  tell(exactly(when), `${c.t.source} · worker ${$("worker").value} · ${$("tier").value} · after ${name(traces.indexOf(c.t), c.told[n])}`, lines, event);
}
function find(px, py) {
  const y = py + $("scroll").scrollTop, row = rows.find((r) => y >= r.y && y < r.y + traces.length * (BAR + 1));
  if (!row || px < gutter) return null;
  const s = Math.min(traces.length - 1, Math.floor((y - row.y) / (BAR + 1))), t = traces[s], when = timeAt(px), slack = timeAt(px + 2) - when;
  let best = null;
  for (let n = atLeast(row.ends[s], when - slack); n < row.parts[s].length; n += 1) {
    const i = row.parts[s][n];
    if (t.start[i] > when + slack) break;
    const far = Math.max(0, t.start[i] - when, when - t.end[i]);
    if (far <= slack && (best === null || far < best.far)) best = { s, i, far };
    if (far === 0) break;
  }
  return best;
}

// ---- moving ------------------------------------------------------------------------------------
function move(from, to) {
  const least = Math.max(1e-9, span * 1e-7), most = span * 1.04, size = Math.min(Math.max(to - from, least), most);
  const middle = (from + to) / 2, edge = span * 0.02;
  from = Math.min(Math.max(middle - size / 2, -edge), span + edge - size);
  view.from = size >= span ? (span - size) / 2 : from;
  view.to = view.from + size;
  draw();
}
function zoom(factor, around = (view.from + view.to) / 2) { move(around + (view.from - around) * factor, around + (view.to - around) * factor); }
const pan = (part) => { const d = (view.to - view.from) * part; move(view.from + d, view.to + d); };
const fit = () => move(0, span);
$("in").onclick = () => zoom(0.6);
$("out").onclick = () => zoom(1 / 0.6);
$("fit").onclick = fit;
const plot = $("plot");
plot.addEventListener("wheel", (event) => {
  const px = event.clientX - plot.getBoundingClientRect().left;
  if (event.ctrlKey || event.metaKey || event.altKey) { event.preventDefault(); zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))), timeAt(Math.max(px, gutter))); return; }
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
  if (sideways) { event.preventDefault(); pan(sideways / (width - gutter)); }
}, { passive: false });
let drag = null;
for (const canvas of plot.querySelectorAll("canvas")) {
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { px: event.clientX, from: view.from, to: view.to };
    canvas.setPointerCapture(event.pointerId);
    plot.classList.add("dragging");
    $("tip").hidden = true;
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left;
    pointer = px;
    if (drag) { const d = ((drag.px - event.clientX) / (width - gutter - RIGHT)) * (drag.to - drag.from); move(drag.from + d, drag.to + d); return; }
    hover = canvas.id === "lanes" ? find(px, event.clientY - box.top) : null;
    if (hover) tellAction(hover.s, hover.i, event); else if (canvas.id === "memory") tellMemory(event, px); else $("tip").hidden = true;
    draw();
  });
  const release = () => { drag = null; plot.classList.remove("dragging"); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { hover = null; pointer = null; $("tip").hidden = true; draw(); });
}
$("lanes").addEventListener("dblclick", (event) => {
  const box = $("lanes").getBoundingClientRect(), hit = find(event.clientX - box.left, event.clientY - box.top);
  if (!hit) return fit();
  const t = traces[hit.s], room = Math.max((t.end[hit.i] - t.start[hit.i]) * 0.6, span * 1e-7);
  move(t.start[hit.i] - room, t.end[hit.i] + room);
});
const act = { ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), a: () => pan(-0.15), d: () => pan(0.15), "+": () => zoom(0.7), "=": () => zoom(0.7), w: () => zoom(0.7), "-": () => zoom(1 / 0.7), s: () => zoom(1 / 0.7), 0: fit };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  const does = act[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (does) { event.preventDefault(); does(); }
});
$("scroll").addEventListener("scroll", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
function size() {
  const shown = Math.min(tall, Math.max(120, innerHeight * 0.56));
  $("scroll").style.height = Math.ceil(shown) + "px";
  $("spacer").style.height = Math.max(0, tall - shown) + "px";
  width = Math.max(320, $("scroll").clientWidth);
  measure();
  draw();
}
new ResizeObserver(size).observe($("view"));
retheme();
size();
keys();
})();
