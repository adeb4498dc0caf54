// What the page shows: units, colours, rows of lanes, memory curves, legends.
// All text goes through textContent or fillText, never through innerHTML: names come from models.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const MEMORY = 250, PAD = 4, STRIP = 4;
const STACK = ["parameters", "master", "optimizer", "gradients", "data", "activations", "workspace"];
const traces = data.traces;
const two = traces.length === 2;
const workers = [...new Set(data.lanes.map(([w]) => w))];
const computes = data.lanes.map(([, lane]) => lane.startsWith("compute"));
const many = workers.length > 1 && computes.some((c) => c);
const AXIS = two ? 44 : 26, RIGHT = many ? 58 : 14;
const span = Math.max(1e-9, ...traces.map((t) => t.end.reduce((a, b) => Math.max(a, b), 0)));
const view = { from: 0, to: span };
const shown = new URLSearchParams(location.hash.slice(1));  // what a link to the page may say
let mode = many && shown.get("rows") !== "lanes" ? "workers" : "lanes", paints = "kind";
let followed = /^\d+$/.test(shown.get("follow")) ? Number(shown.get("follow")) : null;  // a microbatch
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
const kept = (key, make) => { if (!colours.has(key)) colours.set(key, make()); return colours.get(key); };
function mix(a, b, part) {  // of two "#rrggbb"
  const at = (c, n) => parseInt(c.slice(1 + 2 * n, 3 + 2 * n), 16);
  return `rgb(${[0, 1, 2].map((n) => Math.round(at(a, n) * (1 - part) + at(b, n) * part)).join(" ")})`;
}
function colour(name) {  // the theme's, or for a name it does not know a hue of its own
  return kept(name, () => {
    const [, base, state] = /^(\w+)(?:\.(\w+))?$/.exec(name) || [];
    const known = base ? getComputedStyle(document.documentElement).getPropertyValue("--" + base).trim() : "";
    if (known) return state === "gradients" ? mix(known, theme.dark ? "#000000" : "#3a2530", 0.28) : known;
    let hash = 7;
    for (const c of name) hash = (hash * 31 + c.codePointAt(0)) % 3600;
    return `hsl(${hash / 10} 38% ${theme.dark ? 50 : 66}%)`;
  });
}
const lots = Math.max(1, ...traces.map((t) => t.microbatch.reduce((a, b) => Math.max(a, b), 0)));
const LIGHT = { FORWARD: [74, 60], LOSS: [66, 54], RECOMPUTE: [80, 66], BACKWARD: [58, 46], BACKWARD_INPUT: [62, 50], BACKWARD_WEIGHT: [50, 38] };
const hue = (m) => 8 + (300 * m) / lots;  // from red to violet, in the order of the step
function ofMicrobatch(kind, m) {
  if (m < 0) return theme.grey;
  const [light, dark] = LIGHT[kind] || [70, 52];
  return kept(kind + " " + m, () => `hsl(${hue(m)} ${theme.dark ? 42 : 58}% ${theme.dark ? dark : light}%)`);
}
const extreme = two ? traces[1].beyond.reduce((a, b) => Math.max(a, Math.abs(b || 0)), 0) : 0;
const ROOT = 0.7;
function ofBeyond(b) {  // from the quickest over grey to the slowest; by a root, so that small ones show too
  if (!b || !extreme) return theme.grey;
  const part = Math.round(20 * (Math.abs(b) / extreme) ** ROOT) / 20;
  return kept("beyond " + part * Math.sign(b), () => mix(theme.grey, b > 0 ? theme.late : theme.early, part));
}
function fill(s, i) {
  const t = traces[s], kind = data.kinds[t.kind[i]];
  if (paints === "beyond") return s === 0 ? theme.grey : ofBeyond(t.beyond[i]);
  return paints === "microbatch" ? ofMicrobatch(kind, t.microbatch[i]) : colour(kind);
}
const lineInk = (of) => (of === "budget" ? theme.alarm : of === "other" ? theme.soft : theme.ink);
function retheme() {
  const style = getComputedStyle(document.documentElement);
  theme = { dark: matchMedia("(prefers-color-scheme: dark)").matches, font: getComputedStyle(document.body).fontFamily };
  for (const k of ["page", "card", "line", "grid", "band", "ink", "soft", "faint", "accent", "alarm", "grey", "late", "early"]) theme[k] = style.getPropertyValue("--" + k).trim();
  colours.clear();
  for (const s of document.querySelectorAll(".swatch[data-kind]")) s.style.background = colour(s.dataset.kind);
  for (const s of document.querySelectorAll(".swatch.line")) s.style.borderColor = lineInk(s.dataset.of);
  scale();
  draw();
}

// ---- rows: what lies where -----------------------------------------------------------------
// A row is what the gutter names, a worker or one lane of it. It has tracks: bars of a trace, and
// thin strips of what runs beside the computing. ends[n] is the latest end up to n, so a binary
// search finds the first visible action even where actions overlap.
const by = traces.map((t) => { const lists = data.lanes.map(() => []); t.lane.forEach((lane, i) => lists[lane].push(i)); return lists; });
function track(s, lanes, strip) {
  const part = lanes.flatMap((lane) => by[s][lane]).sort((a, b) => a - b);
  let m = -1;
  return { s, strip, part, ends: part.map((i) => (m = Math.max(m, traces[s].end[i]))), y: 0, h: 0 };
}
function workerRow(worker) {
  const mine = data.lanes.map((_, lane) => lane).filter((lane) => data.lanes[lane][0] === worker);
  const [main, beside] = [mine.filter((lane) => computes[lane]), mine.filter((lane) => !computes[lane])];
  const tracks = traces.flatMap((_, s) => {
    const bar = track(s, main, false), strip = track(s, beside, true);
    return !strips[s] ? [bar] : two && s === 0 ? [strip, bar] : [bar, strip];
  });
  return { worker, note: stagesOf(worker), first: true, tracks };
}
const WAY = ["FORWARD", "LOSS", "BACKWARD", "BACKWARD_INPUT", "PREFILL", "DECODE"];  // what the next stage waits for
function stagesOf(worker) {  // "s0, s7" where workers have stages of their own
  const found = new Set(), all = new Set();
  traces.forEach((t) => t.stage.forEach((stage, i) => { if (stage >= 0 && WAY.includes(data.kinds[t.kind[i]])) { all.add(stage); if (data.lanes[t.lane[i]][0] === worker) found.add(stage); } }));
  if (!found.size || found.size === all.size) return "";
  const runs = [];
  for (const n of [...found].sort((a, b) => a - b)) { const last = runs[runs.length - 1]; if (last && last[1] === n - 1) last[1] = n; else runs.push([n, n]); }
  return runs.map(([a, b]) => (a === b ? "s" + a : `s${a}–${b}`)).join(", ");
}
const strips = traces.map((t) => t.lane.some((lane) => !computes[lane]));
let rows = [], tall = 0, BAR = 18;
function layout() {
  rows = mode === "workers" ? workers.map(workerRow) : data.lanes.map(([worker, lane], l) => ({ worker, note: lane, first: l === 0 || data.lanes[l - 1][0] !== worker, tracks: traces.map((_, s) => track(s, [l], false)) }));
  const gap = mode === "workers" && rows.length > 8 ? 6 : 10, thin = strips.filter((any) => any).length * (STRIP + 1);
  BAR = mode === "workers"
    ? Math.max(12, Math.min(30, Math.floor((Math.max(420, innerHeight * 0.6) / rows.length - gap - thin) / traces.length) - 1))
    : Math.max(two ? 15 : 18, Math.min(28, Math.floor(300 / Math.max(1, data.lanes.length * traces.length))));
  tall = PAD;
  rows.forEach((row, r) => {
    if (r) tall += row.first ? gap : PAD;
    row.y = tall;
    for (const one of row.tracks) { one.y = tall; one.h = one.strip ? STRIP : BAR; tall += one.h + 1; }
    row.h = tall - row.y;
  });
  tall += PAD;
}
// Of two that run as one the second is in a lane "... beside": each has half of the worker's bar.
const half = traces.map((t, s) => {
  const found = new Int8Array(t.lane.length);
  data.lanes.forEach(([worker, lane], l) => {
    const main = data.lanes.findIndex(([w, name]) => w === worker && name + " beside" === lane);
    if (main < 0) return;
    const at = new Map(by[s][main].map((i) => [t.start[i], i]));
    for (const i of by[s][l]) { found[i] = 2; if (at.has(t.start[i])) found[at.get(t.start[i])] = 1; }
  });
  return found;
});
const ends = traces.map((t) => t.end.reduce((a, b) => Math.max(a, b), 0));
function idle(one) {  // the part of its trace's time in which a bar has nothing but waiting
  const t = traces[one.s];
  let length = 0, reached = 0;
  for (const i of one.part) { length += Math.max(0, t.end[i] - Math.max(t.start[i] + t.wait[i], reached)); reached = Math.max(reached, t.end[i]); }
  return ends[one.s] ? 1 - length / ends[one.s] : 0;
}
const other = (s, i) => (two && traces[s].twin[i] >= 0 ? traces[s].twin[i] : undefined);  // in the other trace
function name(s, i) {
  const t = traces[s];
  return data.kinds[t.kind[i]] + (t.stage[i] < 0 ? "" : " s" + t.stage[i] + (t.part[i] < 0 ? "" : "#" + t.part[i])) + (t.microbatch[i] < 0 ? "" : " m" + t.microbatch[i]);
}
function atLeast(list, value) {  // first index with list[index] >= value
  let low = 0, high = list.length;
  while (low < high) { const mid = (low + high) >> 1; if (list[mid] < value) low = mid + 1; else high = mid; }
  return low;
}

// ---- memory: one curve a (trace, worker, tier) -----------------------------------------------
const tiers = [...new Set([...data.keys.map((k) => k.split("/")[0]), ...(traces.some((t) => t.peak.some((p) => p)) ? ["device"] : [])])]
  .sort((a, b) => ["device", "host", "disk"].indexOf(a) - ["device", "host", "disk"].indexOf(b));
const made = new Map();
function curve(s, worker, tier) {
  const id = s + " " + worker + " " + tier;
  if (made.has(id)) return made.get(id);
  const t = traces[s], mine = [], kinds = [];
  data.keys.forEach((k, n) => { const cut = k.indexOf("/"); if (k.slice(0, cut) === tier) kinds.push({ name: k.slice(cut + 1), n }); });
  const rank = (k) => (STACK.indexOf(k.name) + 1 || STACK.length + 1);
  kinds.sort((a, b) => rank(a) - rank(b));
  t.lane.forEach((row, i) => { if (data.lanes[row][0] === worker) mine.push(i); });
  const told = data.keys.length ? mine.filter((i) => t.live[0][i] >= 0).sort((a, b) => t.end[a] - t.end[b]) : [];
  const sum = told.map((i) => kinds.reduce((all, k) => all + t.live[k.n][i], 0));
  const c = { t, kinds, told, sum, when: told.map((i) => t.end[i]), peaks: tier === "device" ? mine.filter((i) => t.peak[i]) : [], top: 0, at: 0, by: -1 };
  told.forEach((i, n) => { if (sum[n] > c.top) { c.top = sum[n]; c.at = t.end[i]; c.by = i; } });
  for (const i of c.peaks) if (t.peak[i] > c.top || (t.peak[i] === c.top && c.by < 0)) { c.top = t.peak[i]; c.at = (t.start[i] + t.end[i]) / 2; c.by = i; }
  made.set(id, c);
  return c;
}
function options(select, values, texts, chosen, changed = keys) {
  values.forEach((v, n) => { const o = document.createElement("option"); o.value = v; o.textContent = texts[n]; select.append(o); });
  select.value = chosen;
  select.hidden = values.length < 2;
  select.addEventListener("change", () => { changed(); draw(); });
}
options($("source"), traces.map((_, s) => s), traces.map((t) => t.source), traces.length - 1);
options($("tier"), tiers, tiers.map((t) => t + " memory"), tiers[0]);
const fullest = workers.reduce((best, w) => (tiers.length && curve(traces.length - 1, w, tiers[0]).top > curve(traces.length - 1, best, tiers[0]).top ? w : best), workers[0]);
options($("worker"), workers, workers.map((w) => "worker " + w + (w === fullest && workers.length > 1 ? " (highest)" : "")), fullest);
options($("rows"), many ? ["workers", "lanes"] : ["lanes"], ["by worker", "every lane"], mode, () => { mode = $("rows").value; layout(); size(); });
const ways = [["kind", "colour: kind"], ...(lots > 1 ? [["microbatch", "colour: microbatch"]] : []), ...(extreme ? [["beyond", "colour: beyond forecast"]] : [])];
options($("paints"), ways.map(([w]) => w), ways.map(([, text]) => text), ways.some(([w]) => w === shown.get("colour")) ? shown.get("colour") : "kind", () => scale());
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
function scale() {  // the legend of colours that are no kinds
  paints = $("paints").value || "kind";
  $("actions").hidden = paints !== "kind";
  $("scale").hidden = paints === "kind";
  if (paints === "kind") return;
  const bar = document.createElement("i"), stops = [...Array(11).keys()].map((n) => n / 10);
  bar.className = "ramp";
  const inks = paints === "microbatch" ? stops.map((n) => ofMicrobatch("FORWARD", n * lots)) : stops.map((n) => ofBeyond(Math.sign(2 * n - 1) * Math.abs(2 * n - 1) ** (1 / ROOT) * extreme));
  bar.style.background = `linear-gradient(90deg, ${inks.join(", ")})`;
  const [left, right] = paints === "microbatch" ? ["m0", "m" + lots + ", backward darker"] : ["quicker than predicted by " + seconds(extreme), "slower by " + seconds(extreme)];
  $("scale").replaceChildren(left, bar, right);
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

