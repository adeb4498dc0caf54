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
function paint() {
  drawAxis();
  drawLanes();
  drawMemory();
  document.body.dataset.drawn = "yes";
}
function draw() {  // many changes, one painting a frame
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    paint();
  });
}

