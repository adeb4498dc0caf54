// What the page shows: units, colours, rows of lanes, memory curves, legends.
// All text goes through textContent or fillText, never through innerHTML: names come from models.
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

