// Draws the memory curve: a stack by kind, the peak while actions run, the budget.
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
