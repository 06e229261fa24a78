// How report.html and the loss curve look: colours for light and dark, style sheets, and the script that shows values under
// the cursor. The page is whole without the script.
#pragma once
#include <string>

inline const std::string report_colors = R"css(
:root { color-scheme: light dark; --page: #f6f5f1; --card: #ffffff; --ink: #1c2127; --soft: #6b7280; --grid: #ecebe6;
  --axis: #c9c8c2;
  --train: #2563c9; --valid: #d9570b; --other: #0f766e; --base: #8a8f98; --good: #237a3b; --bad: #c02626; --edge: #e4e2db; }
@media (prefers-color-scheme: dark) {
:root { --page: #0f1216; --card: #171b21; --ink: #e7e9ec; --soft: #929aa6; --grid: #242a32; --axis: #454d59;
  --train: #6ea4ff; --valid: #ff9a57; --other: #4fd1bd; --base: #7d8694; --good: #5fca7c; --bad: #ff7b72; --edge: #262c35; } }
.raw, .train, .valid, .other, .baseline { --c: var(--train); }
.valid { --c: var(--valid); } .other { --c: var(--other); } .baseline { --c: var(--base); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.raw { stroke-width: 1; opacity: .4; } .line.baseline { stroke-width: 1.5; stroke-dasharray: 5 5; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5; } .line.valid { stroke-width: 1.5; }
.grid { stroke: var(--grid); } .axis { stroke: var(--axis); fill: none; } .mark { fill: var(--bad); } .abandoned { --c: var(--bad); }
.note { stroke: var(--base); stroke-dasharray: 2 4; fill: none; }
.tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
)css";

inline const std::string svg_style = R"css(
.paper { fill: var(--card); stroke: var(--edge); } .title { fill: var(--ink); font-size: 15px; font-weight: 600; }
.label { fill: var(--c); font-size: 12.5px; font-weight: 600; font-variant-numeric: tabular-nums; }
)css";

inline const std::string report_style = R"css(
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Noto Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; letter-spacing: -.01em; margin: 0; display: inline; overflow-wrap: anywhere; }
h2 { font-size: 14px; margin: 0; font-weight: 600; } h2.part { font-size: 17px; margin: 34px 0 10px; }
header p { margin: 6px 0 12px; color: var(--soft); font-variant-numeric: tabular-nums; }
.status { display: inline-block; vertical-align: 4px; margin-left: 12px; padding: 1px 10px; border-radius: 99px;
  font-size: 13px; font-weight: 600;
  color: var(--train); background: color-mix(in srgb, currentColor 13%, transparent); }
.status.finished { color: var(--good); } .status.failed, #updated.stale { color: var(--bad); }
.status.stopped { color: var(--valid); }
header p.why { margin: 10px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.progress { height: 4px; border-radius: 2px; background: var(--edge); overflow: hidden; }
.progress div { height: 100%; background: var(--train); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px; margin: 18px 0 14px; }
.tile { padding: 12px 16px; display: flex; flex-direction: column; }
.tile span, .tile small { color: var(--soft); font-size: 13px; }
.tile strong { font-size: 27px; line-height: 1.25; font-weight: 600; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
figure { margin: 0 0 14px; padding: 14px 12px 8px; overflow-x: auto; }
svg { display: block; width: 100%; height: auto; min-width: 320px; } #loss { min-width: 640px; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 18px; align-items: center; padding: 0 6px 6px; }
.keys { margin-left: auto; display: flex; flex-wrap: wrap; gap: 0 18px; font-size: 13px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.key b, .at { color: var(--ink); font-weight: 600; }
.key i { display: inline-block; width: 16px; height: 0; border-top: 2.5px solid var(--c); vertical-align: 4px;
  margin-right: 7px; }
.key i.baseline { border-top-style: dashed; border-top-width: 2px; }
.cursor path { stroke: var(--base); stroke-width: 1; } .empty { padding: 60px; text-align: center; color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 0 14px; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 14px; }
.samples h3 { margin: 0; padding: 10px 16px 0; font-size: 13px; font-weight: 600; color: var(--soft); }
blockquote { margin: 4px 0 0; padding: 0 16px 14px; max-height: 15em; overflow: auto; white-space: pre-wrap;
  overflow-wrap: anywhere;
  font: 15px/1.6 Charter, "Iowan Old Style", Georgia, "Noto Serif", "Noto Serif CJK JP", serif; }
blockquote b { color: var(--train); font-weight: 600; }
table { width: 100%; border-spacing: 0; padding: 6px 0; font-size: 14px; }
td, th { padding: 4px 16px; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 400; white-space: nowrap; width: 1%; }
td { font-variant-numeric: tabular-nums; white-space: pre-wrap; }
.events .warning td { color: var(--valid); } .events .error td { color: var(--bad); }
details { margin-top: 24px; } summary { cursor: pointer; font-weight: 600; margin-bottom: 10px; }
.options { font-family: ui-monospace, monospace; font-size: 13px; }
)css";

inline const std::string report_script = R"js(
// One cursor over all charts: the values at the step under the pointer replace the last ones in the captions.
function number(c, v) {
  if (c.d >= 0) return v.toFixed(c.d);
  const a = Math.abs(v);
  if (a === 0) return "0";
  for (const [unit, suffix] of [[1e9, "B"], [1e6, "M"], [1e3, "K"]])
    if (a >= 99999.5 && a >= unit) return (v / unit).toPrecision(3) + suffix;
  if (a >= 1000) return Math.round(v).toLocaleString("en");
  return a >= 0.00995 ? String(+v.toPrecision(4)) : v.toExponential(2).replace(/\.?0*e/, "e");
}
function nearest(xs, x) {
  let lo = 0, hi = xs.length - 1;
  while (hi - lo > 1) { const m = (lo + hi) >> 1; if (xs[m] < x) lo = m; else hi = m; }
  return Math.abs(xs[lo] - x) <= Math.abs(xs[hi] - x) ? lo : hi;
}
function place(c, v) { return c.log ? (Math.log(v) - Math.log(c.y0)) / (Math.log(c.y1) - Math.log(c.y0)) : (v - c.y0) / (c.y1 - c.y0); }
function show(x) {
  for (const c of charts) {
    const px = c.l + (c.r - c.l) * Math.min(1, Math.max(0, (x - c.x0) / (c.x1 - c.x0)));
    c.cursor.setAttribute("visibility", "visible");
    c.cursor.querySelector("path").setAttribute("transform", `translate(${px})`);
    c.figure.querySelector(".at").textContent = "step " + Math.round(x).toLocaleString("en");
    c.s.forEach((s, k) => {
      if (!s.x.length) return;
      const i = nearest(s.x, x), dot = c.cursor.querySelectorAll("circle")[k], part = place(c, s.y[i]);
      c.figure.querySelector(`[data-s="${s.i}"]`).textContent = number(c, s.y[i]);
      dot.setAttribute("cx", c.l + (c.r - c.l) * (s.x[i] - c.x0) / (c.x1 - c.x0));
      dot.setAttribute("cy", c.b - (c.b - c.t) * part);
      dot.setAttribute("visibility", part >= 0 && part <= 1 ? "inherit" : "hidden");
    });
  }
}
function hide() {
  for (const c of charts) {
    c.cursor.setAttribute("visibility", "hidden");
    c.figure.querySelector(".at").textContent = "";
    for (const s of c.s)
      if (s.x.length) c.figure.querySelector(`[data-s="${s.i}"]`).textContent = number(c, s.y[s.y.length - 1]);
  }
}
for (const c of charts) {
  const svg = document.getElementById(c.id);
  c.figure = svg.closest("figure"), c.cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", e => {
    const box = svg.getBoundingClientRect(), px = (e.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    show(Math.min(c.x1, Math.max(c.x0, c.x0 + (c.x1 - c.x0) * (px - c.l) / (c.r - c.l))));
  });
  svg.addEventListener("pointerleave", hide);
}
// A page that was not rewritten for long may belong to a run that died without a word.
const updated = document.getElementById("updated"), running = document.querySelector(".status.running");
const minutes = Math.floor((Date.now() / 1000 - updated.dataset.time) / 60);
if (running && minutes >= 10) {
  updated.classList.add("stale");
  updated.textContent += ` No news for ${minutes} minutes.`;
}
)js";
