// Draws the axis and the lanes.
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
  const g = surface($("axis"), AXIS), [all, every] = ticks(), top = AXIS - 26;
  const [scale, unit] = every >= 0.1 ? [1, "s"] : every >= 1e-4 ? [1e3, "ms"] : [1e6, "µs"];
  const n = Math.min(6, Math.max(0, -Math.floor(Math.log10(every * scale) + 1e-9)));
  g.fillStyle = theme.soft;
  g.textAlign = "center";
  for (const t of all) {
    const text = digits(t * scale, n) + " " + unit, half = g.measureText(text).width / 2;
    g.fillText(text, Math.min(Math.max(x(t), gutter + half - 8), width - RIGHT - half + 8), top + 11);
    g.fillRect(x(t) - 0.5, AXIS - 5, 1, 5);
  }
  if (mode === "workers") { g.textAlign = "right"; g.fillStyle = theme.faint; g.fillText("idle", width - 4, top + 11); }
  if (two) traces.forEach((_, s) => flag(g, s));
}
function flag(g, s) {  // when a trace ends: on the left of its line, the later one where there is room
  const px = x(ends[s]), before = x(ends[1 - s]), later = px > before || (px === before && s === 1);
  if (px < gutter || px > width - RIGHT + 1) return;
  const time = seconds(ends[s]), text = traces[s].source + " " + time, size = g.measureText(text).width;
  const right = later && (px + size + 6 <= width || px - size - 12 < before);
  g.textAlign = right ? "left" : "right";
  g.fillStyle = s === 0 ? theme.soft : theme.ink;
  g.fillText(right && px + size + 6 > width ? time : text, right ? px + 6 : Math.max(px - 6, gutter + size - 8), 8);
  end(g, s, 2, AXIS);
}
function end(g, s, from, to) {
  g.strokeStyle = s === 0 ? theme.soft : theme.ink;
  g.lineWidth = 1.2;
  g.setLineDash(s === 0 ? [4, 3] : []);
  g.beginPath();
  g.moveTo(x(ends[s]), from);
  g.lineTo(x(ends[s]), to);
  g.stroke();
  g.setLineDash([]);
}
function grid(g, height) {
  g.fillStyle = theme.grid;
  for (const t of ticks()[0]) g.fillRect(x(t) - 0.5, 0, 1, height);
}
function drawLanes() {
  const height = Math.min(tall, $("scroll").clientHeight || tall), g = surface($("lanes"), height), scroll = $("scroll").scrollTop;
  const seen = rows.filter((row) => row.y + row.h >= scroll && row.y <= scroll + height);
  g.save();
  g.translate(0, -scroll);
  g.fillStyle = theme.band;
  for (const row of seen) g.fillRect(gutter, row.y - 1, width - gutter - RIGHT, row.h + 1);
  g.restore();
  grid(g, height);
  g.translate(0, -scroll);
  g.save();
  g.beginPath();
  g.rect(gutter, scroll, width - gutter - RIGHT + 1, height);
  g.clip();
  if (two) traces.forEach((_, s) => end(g, s, scroll, scroll + height));
  for (const row of seen) for (const one of row.tracks) drawTrack(g, one);
  if (followed !== null) thread(g);
  g.restore();
  for (const row of seen) drawGutter(g, row);
  cross(g, scroll, height);
}
let columns = [0, 0, 0];  // width of the labels: worker, lane or stages, source
function measure() {
  const g = $("axis").getContext("2d");
  g.font = "12px " + theme.font;
  const widest = (texts, most) => Math.min(most, Math.max(0, ...texts.map((t) => g.measureText(t).width)));
  const note = widest(rows.map((r) => r.note), 120);
  columns = [workers.length > 1 ? widest(workers.map((w) => "worker " + w), 110) + 14 : 0, note ? note + 14 : 0, two ? 58 : 0];
  gutter = Math.max(84, Math.ceil(columns[0] + columns[1] + columns[2]));
}
function drawGutter(g, row) {
  g.textAlign = "left";
  if (row.first && workers.length > 1) {
    g.fillStyle = theme.ink;
    g.fillText(shorten(g, "worker " + row.worker, columns[0] - 8), 0, row.y + row.h / 2);
  }
  g.fillStyle = theme.soft;
  g.fillText(shorten(g, row.note, columns[1] - 8), columns[0], row.y + row.h / 2);
  g.font = "10.5px " + theme.font;
  g.fillStyle = theme.faint;
  for (const one of row.tracks) {
    if (one.strip) continue;
    const y = one.y + one.h / 2 + 0.5;
    if (two) g.fillText(traces[one.s].source, columns[0] + columns[1], y);
    if (mode !== "workers") continue;
    g.textAlign = "right";
    g.fillText(digits(100 * (one.idle ??= idle(one)), 0) + "%", width - 4, y);
    g.textAlign = "left";
  }
  g.font = "12px " + theme.font;
}
function drawTrack(g, one) {
  const { s, part } = one, t = traces[s], faded = two && s === 0;
  const first = atLeast(one.ends, view.from), room = (width - gutter) / Math.max(1, part.findLastIndex((i) => t.start[i] <= view.to) - first);
  const least = room < 8 ? 24 : 9;  // in a crowd a few numbers are noise
  let painted = -1;
  for (let n = first; n < part.length; n += 1) {
    const i = part[n];
    if (t.start[i] > view.to) break;
    if (t.end[i] < view.from) continue;
    const kind = data.kinds[t.kind[i]], off = (single !== null && kind !== single) || (followed !== null && t.microbatch[i] !== followed);
    const left = Math.max(x(t.start[i]), gutter - 4), right = Math.min(x(t.end[i]), width + 4), wide = right - left;
    if (wide < 1) {  // many of them share a pixel: paint each pixel once
      const pixel = Math.floor(left);
      if (pixel === painted && !((single !== null || followed !== null) && !off)) continue;
      painted = pixel;
    }
    const [y, h] = place(one, i);
    g.globalAlpha = off ? 0.13 : faded ? 0.62 : 1;
    g.fillStyle = fill(s, i);
    const from = Math.min(Math.max(x(t.start[i] + t.wait[i]), left), right);
    if (from > left + 1) box(g, left, y, from - left, h, off ? 0.06 : 0.24);
    box(g, from, y, Math.max(right - from, 1), h);
    if (hover && (hover.i === i && hover.s === s || hover.s !== s && other(hover.s, hover.i) === i)) {
      g.globalAlpha = 1;
      g.strokeStyle = theme.ink;
      g.lineWidth = 1.5;
      g.stroke();
    }
    if (right - from > least && h > 10) label(g, s, i, from, right - from, y + h / 2, off);
  }
  g.globalAlpha = 1;
}
function place(one, i) {  // top and height of an action in its track
  const part = mode === "workers" && !one.strip ? half[one.s][i] : 0;
  return part ? [one.y + (part === 2 ? one.h / 2 + 0.5 : 0), one.h / 2 - 0.5] : [one.y, one.h];
}
function box(g, left, y, wide, h, alpha) {  // alpha: of what is only waiting
  const before = g.globalAlpha;
  if (alpha) g.globalAlpha = alpha;
  g.beginPath();
  if (wide > 9 && h > 6) g.roundRect(left + 0.5, y, wide - 1, h, 2.5); else g.rect(left, y, Math.max(wide > 2 ? wide - 0.5 : wide, 1), h);
  g.fill();
  g.globalAlpha = before;
}
function thread(g) {  // the way of the followed microbatch from action to action
  for (let s = 0; s < traces.length; s += 1) {
    const t = traces[s], path = [];
    for (const row of rows) for (const one of row.tracks) if (one.s === s && !one.strip) for (const i of one.part) if (t.microbatch[i] === followed && WAY.includes(data.kinds[t.kind[i]])) { const [y, h] = place(one, i); path.push([t.start[i] + t.wait[i], t.end[i], y + h / 2]); }
    path.sort((a, b) => a[0] - b[0]);
    g.strokeStyle = s === traces.length - 1 ? theme.ink : theme.soft;
    g.lineWidth = 1.2;
    g.setLineDash(two && s === 0 ? [3, 3] : []);
    g.globalAlpha = 0.75;
    g.beginPath();
    for (let n = 1; n < path.length; n += 1) { g.moveTo(x(path[n - 1][1]), path[n - 1][2]); g.lineTo(x(path[n][0]), path[n][2]); }
    g.stroke();
    g.setLineDash([]);
    g.globalAlpha = 1;
  }
}
function label(g, s, i, left, wide, middle, off) {
  const t = traces[s], m = t.microbatch[i], short = m < 0 ? [] : ["m" + m];
  if (t.stage[i] >= 0) short.unshift(("s" + t.stage[i] + " " + (short[0] || "")).trim());
  g.globalAlpha = off ? 0.35 : 1;
  g.font = "11px " + theme.font;
  g.textAlign = "center";
  g.fillStyle = theme.dark ? (two && s === 0 ? "#e8e9ec" : "#0f1114") : "#1d2126";
  const kind = data.kinds[t.kind[i]].toLowerCase().replace(/_/g, " "), tail = short[0] ? " " + short[0] : "";
  const bare = mode === "workers" && m >= 0 ? [String(m)] : [...short, ...(short.length ? [] : [kind])];
  for (const text of [kind + tail, ...bare]) {
    if (g.measureText(text).width <= wide - (wide < 24 ? 2 : 8)) { g.fillText(text, left + wide / 2, middle + 0.5); break; }
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
function paint() {
  drawAxis();
  drawLanes();
  drawMemory();
  Object.assign(document.body.dataset, { drawn: "yes", rows: mode, colour: paints });
}
function draw() {  // many changes, one painting a frame
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    paint();
  });
}

