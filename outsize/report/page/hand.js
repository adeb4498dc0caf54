// Tooltips, zooming and panning; and the start, since everything is defined by then.
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
const signed = (v) => (v < 0 ? "−" : "+") + exactly(Math.abs(v));
function tellAction(s, i, event) {
  const t = traces[s], [worker, lane] = data.lanes[t.lane[i]], lasted = t.end[i] - t.start[i], lines = [["start", exactly(t.start[i])], ["duration", exactly(lasted)]];
  if (t.wait[i]) lines.push(["of it waiting for others", exactly(t.wait[i])]);
  const j = other(s, i);
  if (j !== undefined) {
    const o = traces[1 - s], there = o.end[j] - o.start[j], [a, b] = s === 1 ? [j, i] : [i, j];
    lines.push([o.source, exactly(there)]);
    lines.push(["beyond forecast", signed(traces[1].beyond[b]), "", true]);
    lines.push(["began against forecast", signed(traces[1].start[b] - traces[0].start[a])]);
  } else if (two) lines.push(["in " + traces[1 - s].source, "not there"]);
  if (t.peak[i]) lines.push(["peak while it ran", bytes(t.peak[i]), "", true]);
  data.keys.forEach((k, n) => { if (t.live[n][i] > 0) lines.push([k.replace("/", " "), bytes(t.live[n][i]), k.slice(k.indexOf("/") + 1), n === 0 && !t.peak[i]]); });
  tell(name(s, i), `${t.source} · worker ${worker} · ${lane}`, lines, event);
}
function tellMemory(event, px) {
  const c = chosen(), when = timeAt(px), n = atLeast(c.when, when + 1e-12) - 1;
  if (n < 0 || px < gutter) { $("tip").hidden = true; return; }
  const lines = [...c.kinds].reverse().map((k) => [k.name, bytes(c.t.live[k.n][c.told[n]]), k.name]);
  lines.push(["together", bytes(c.sum[n]), "", true]);
  tell(exactly(when), `${c.t.source} · worker ${$("worker").value} · ${$("tier").value} · after ${name(traces.indexOf(c.t), c.told[n])}`, lines, event);
}
function find(px, py) {
  const y = py + $("scroll").scrollTop;
  const one = rows.filter((row) => y >= row.y && y < row.y + row.h).flatMap((row) => row.tracks).find((each) => y >= each.y && y < each.y + each.h + 1);
  if (!one || px < gutter || px > width - RIGHT + 2) return null;
  const { s, part } = one, t = traces[s], when = timeAt(px), slack = timeAt(px + 2) - when;
  let best = null;
  for (let n = atLeast(one.ends, when - slack); n < part.length; n += 1) {
    const i = part[n], [top, h] = place(one, i);
    if (t.start[i] > when + slack) break;
    if (y < top || y > top + h + 1) continue;
    const far = Math.max(0, t.start[i] - when, when - t.end[i]);
    if (far <= slack && (best === null || far < best.far)) best = { s, i, far };
    if (far === 0) break;
  }
  return best;
}
function follow(hit) {
  const m = hit ? traces[hit.s].microbatch[hit.i] : -1;
  followed = m < 0 || m === followed ? null : m;
  draw();
}
function show(s, i) {  // an action in the middle, with what is around it
  const t = traces[s], room = Math.max((t.end[i] - t.start[i]) * 4, span * 0.02);
  const row = rows.find((r) => r.tracks.some((one) => one.s === s && one.part.includes(i)));
  $("scroll").scrollTop = row.y - $("scroll").clientHeight / 2;
  hover = { s, i };
  move(t.start[i] - room, t.end[i] + room);
  $("plot").scrollIntoView({ block: "nearest" });
}
for (const button of document.querySelectorAll("button[data-event]")) button.onclick = () => show(1, Number(button.dataset.event));

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
  canvas.addEventListener("pointerup", (event) => {
    const box = canvas.getBoundingClientRect();
    if (drag && Math.abs(event.clientX - drag.px) < 4 && canvas.id === "lanes") follow(find(event.clientX - box.left, event.clientY - box.top));
    release();
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { hover = null; pointer = null; $("tip").hidden = true; draw(); });
}
$("lanes").addEventListener("dblclick", (event) => {
  const box = $("lanes").getBoundingClientRect(), hit = find(event.clientX - box.left, event.clientY - box.top);
  if (!hit) return fit();
  const t = traces[hit.s], room = Math.max((t.end[hit.i] - t.start[hit.i]) * 0.6, span * 1e-7);
  move(t.start[hit.i] - room, t.end[hit.i] + room);
});
const act = { ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), a: () => pan(-0.15), d: () => pan(0.15), "+": () => zoom(0.7), "=": () => zoom(0.7), w: () => zoom(0.7), Escape: () => follow(null), "-": () => zoom(1 / 0.7), s: () => zoom(1 / 0.7), 0: fit };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  const does = act[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (does) { event.preventDefault(); does(); }
});
$("scroll").addEventListener("scroll", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
function size() {
  const seen = Math.min(tall, Math.max(120, innerHeight * 0.66));
  $("scroll").style.height = Math.ceil(seen) + "px";
  $("spacer").style.height = Math.max(0, tall - seen) + "px";
  width = Math.max(320, $("scroll").clientWidth);
  measure();
  draw();
}
new ResizeObserver(size).observe($("view"));
layout();
retheme();
size();
keys();
paint();
