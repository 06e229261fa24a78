// Appearance of report.html and the loss curve: colors for light and dark, style sheets, and the script that draws the charts
// at the width of the window, zooms and smooths. The page is readable without the script, as it also has the charts as
// pictures.
//
// Why the script is our own: every report contains it, is rewritten every few seconds, and must open from a disk without a
// network, so its size is paid each time. Among the chart libraries that Debian packages, dygraphs 2.2 (MIT) fits best: 131 KB,
// with zoom, logarithmic axes and a moving average; Chart.js 3.9 (MIT) is 200 KB and needs a plugin for zoom that is not
// packaged; Flot 4.2 (MIT) is 168 KB and needs jQuery; D3 5 (BSD) is 258 KB of parts to build charts from. uPlot (50 KB) is not
// packaged. All but D3 draw on a canvas: we would still need our own pictures for readers without scripts, with their axes
// (chart.h), and our own runs overlaid on an x axis in tokens or seconds, envelopes that keep spikes, CSV, keyboard and
// captions. dygraphs would save about 100 of the lines below; these are 19 KB.
#pragma once
#include <string>

inline const std::string report_colors = R"css(
:root { color-scheme: light dark; --page: #f6f5f1; --card: #ffffff; --ink: #1c2127; --soft: #6b7280; --grid: #ecebe6;
  --axis: #c9c8c2;
  --train: #2563c9; --valid: #d9570b; --other: #0f766e; --base: #8a8f98; --good: #237a3b; --bad: #c02626; --edge: #e4e2db;
  --run3: #b5307a; --run4: #8a6d00; --run5: #7347d1; }
@media (prefers-color-scheme: dark) {
:root { --page: #0f1216; --card: #171b21; --ink: #e7e9ec; --soft: #929aa6; --grid: #242a32; --axis: #454d59;
  --train: #6ea4ff; --valid: #ff9a57; --other: #4fd1bd; --base: #7d8694; --good: #5fca7c; --bad: #ff7b72; --edge: #262c35;
  --run3: #f28ac0; --run4: #d9bc4a; --run5: #b79cff; } }
.train { --c: var(--train); } .valid { --c: var(--valid); } .other { --c: var(--other); } .baseline { --c: var(--base); }
.run0 { --c: var(--train); } .run1 { --c: var(--valid); } .run2 { --c: var(--other); } .run3 { --c: var(--run3); }
.run4 { --c: var(--run4); } .run5 { --c: var(--run5); } .run6 { --c: var(--good); } .run7 { --c: var(--base); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.pale { fill: var(--c); stroke: var(--c); stroke-width: 1; stroke-linejoin: round; opacity: .25; }
.line.baseline { stroke-width: 1.5; stroke-dasharray: 5 5; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5; } .line.valid { stroke-width: 1.5; stroke-dasharray: 6 3; }
.grid { stroke: var(--grid); } .axis { stroke: var(--axis); fill: none; } .mark { fill: var(--bad); } 
.abandoned { --c: var(--bad); }
.note { stroke: var(--base); stroke-dasharray: 2 4; fill: none; }
.tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
)css";

inline const std::string svg_style = R"css(
.paper { fill: var(--card); stroke: var(--edge); } .title { fill: var(--ink); font-size: 15px; font-weight: 600; }
.label { fill: var(--c); font-size: 12.5px; font-weight: 600; font-variant-numeric: tabular-nums; }
)css";

inline const std::string report_style = R"css(
* { box-sizing: border-box; }
.experts svg { display: block; width: 100%; shape-rendering: crispEdges; } .experts path { stroke: var(--c); fill: none; }
.experts i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .8em; background: var(--c); }
.experts span { display: inline-block; }
.load0 { --c: var(--bad); } .load1 { --c: color-mix(in srgb, var(--train) 70%, var(--card)); }
.load2 { --c: color-mix(in srgb, var(--train) 35%, var(--card)); } .load3 { --c: var(--grid); }
.load4 { --c: color-mix(in srgb, var(--valid) 35%, var(--card)); }
.load5 { --c: color-mix(in srgb, var(--valid) 70%, var(--card)); } .load6 { --c: var(--valid); }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Noto Sans", sans-serif; }
[hidden] { display: none !important; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 24px 64px; }
svg:focus:not(:focus-visible) { outline: none; } :focus-visible { outline: 2px solid var(--train); outline-offset: 2px; }
h1 { font-size: 26px; line-height: 1.25; letter-spacing: -.01em; margin: 0; display: inline; overflow-wrap: anywhere; }
h2 { font-size: 14px; margin: 0; font-weight: 600; } h2.part { font-size: 17px; margin: 34px 0 10px; }
header p { margin: 6px 0 12px; color: var(--soft); font-variant-numeric: tabular-nums; }
.status { display: inline-block; vertical-align: 4px; margin-left: 12px; padding: 1px 10px; border-radius: 99px;
  font-size: 13px; font-weight: 600;
  color: var(--train); background: color-mix(in srgb, currentColor 13%, transparent); }
.status.finished { color: var(--good); } .status.failed, .status.silent, #updated.stale { color: var(--bad); }
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
.controls { display: flex; flex-wrap: wrap; gap: 6px 20px; align-items: center; margin: 0 0 12px; font-size: 14px; }
.controls label, .controls output { display: inline-flex; align-items: center; gap: 7px; } .controls output { width: 3.2em; }
.controls input[type=range] { width: 120px; } .controls small { color: var(--soft); font-size: 13px; }
button, select { font: inherit; font-size: 13px; color: inherit; background: var(--card); border: 1px solid var(--edge);
  border-radius: 6px; padding: 3px 9px; cursor: pointer; } button:disabled { opacity: .45; cursor: default; }
.tools button[aria-pressed=true] { color: var(--card); background: var(--soft); }
figure { margin: 0 0 14px; padding: 14px 12px 8px; overflow-x: auto; min-width: 0; }
svg { display: block; width: 100%; height: auto; min-width: 320px; } #loss { min-width: 640px; }
.live figure { overflow: hidden; } 
.live svg, .live #loss { min-width: 0; touch-action: pan-y; cursor: crosshair; user-select: none; }
.chosen { fill: var(--train); opacity: .15; }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; padding: 0 6px 6px; }
.tools { display: flex; gap: 6px; } .tools button { padding: 1px 7px; font-size: 12px; color: var(--soft); }
.keys { margin-left: auto; display: flex; flex-wrap: wrap; gap: 0 16px; font-size: 13px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.several .keys, .pair .keys:has(i) { margin-left: 0; order: 1; width: 100%; } 
.several .tools, .pair .keys:has(i) + .tools { margin-left: auto; } span.key { padding: 2px 0; }
.key i.valid, i.dashed { border-top-style: dashed !important; } 
.line.dashed { stroke-dasharray: 7 4; } .several .pale { opacity: .15; }
button.key { border: 0; padding: 2px 0; background: none; text-align: left; overflow-wrap: anywhere; }
.live .key[aria-pressed=false] { opacity: .45; text-decoration: line-through; }
.key b, .at { color: var(--ink); font-weight: 600; } .at:empty { display: none; }
.key i, .runs i { display: inline-block; width: 16px; height: 0; border-top: 2.5px solid var(--c); vertical-align: 4px;
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
.wide { overflow-x: auto; } table { width: 100%; border-spacing: 0; padding: 6px 0; font-size: 14px; }
td, th { padding: 4px 16px; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 400; white-space: nowrap; width: 1%; }
td { font-variant-numeric: tabular-nums; white-space: pre-wrap; }
.runs { white-space: nowrap; } .runs td { white-space: nowrap; } .runs .status { margin: 0; vertical-align: 0; }
.runs tr:not(:first-child) th { color: var(--ink); font-weight: 600; white-space: normal; min-width: 8em;
  width: auto; }
.ranks th { white-space: normal; width: auto; min-width: 6em; } .ranks td { white-space: nowrap; }
.ranks .bar { width: 45%; min-width: 80px; font-size: 0; vertical-align: middle; }
.bar i { display: inline-block; height: 10px; background: var(--c); } .slowest th, .slowest td { color: var(--valid); }
.events .warning td { color: var(--valid); } .events .error td { color: var(--bad); }
details { margin-top: 24px; } summary { cursor: pointer; font-weight: 600; margin-bottom: 10px; }
.options { font-family: ui-monospace, monospace; font-size: 13px; }
.differences td, .differences th { min-width: 7em; overflow-wrap: break-word; }
.wide { margin-bottom: 14px; }
@media (max-width: 600px) {
main { padding: 18px 12px 48px; } h1 { font-size: 22px; } .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
.tile { padding: 9px 12px; } .tile strong { font-size: 22px; } 
td, th { padding: 4px 9px; } .facts th { white-space: normal; width: 40%; } .differences th { width: auto; }
.tile:last-child:nth-child(odd) { grid-column: 1 / -1; }
body:not(.live) .tick { font-size: 15px; } body:not(.live) #loss .tick { font-size: 20px; }
figure { padding: 10px 6px 6px; } .keys { margin-left: 0; order: 1; width: 100%; } .tools { margin-left: auto; } }
)css";

// The controls of the script; hidden without it.
inline const std::string report_controls = R"html(<form class="controls" hidden="">
<label>x axis <select id="unit"><option value="step">steps</option><option value="tokens">tokens</option>
<option value="seconds">time</option></select></label>
<label><input type="checkbox" id="logx" /> log x</label>
<label>smoothing <input type="range" id="smooth" min="0" max="20" /> <output id="smoothed"></output></label>
<button type="button" id="whole" title="also: a double click on a chart, or Esc">reset zoom</button>
<small>Drag over a chart to zoom in.</small></form>
)html";

inline const std::string report_script = R"js(
// ---- numbers, axes and curves: functions that need no page ----
const trim = text => text.replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
// 0, 12,000, 150K, 0.25, 3e-4; digits >= 0: decimals; precision: significant digits before K, M, ...
function number(v, digits = -1, precision = 5) {
  const a = Math.abs(v);
  if (!Number.isFinite(v)) return "-";
  if (digits >= 0 && a < 1e6) return v.toFixed(digits);
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]])
    if (a >= 99999.5 && a >= unit * 0.9999 && a < 1e16) return trim((v / unit).toPrecision(precision)) + suffix;
  if (a >= 1000 && a < 99999.5) return Math.round(v).toLocaleString("en");
  return a === 0 ? "0" : a >= 0.00995 && a < 1e6 ? String(+v.toPrecision(4)) : trim(v.toExponential(2)).replace("e+", "e");
}
function duration(s) {
  const two = v => String(v).padStart(2, "0");
  if (s < 9.95) return trim(s.toFixed(1)) + "s";
  const whole = Math.round(s), m = Math.round(s / 60), h = Math.floor(m / 60);
  if (whole < 60) return whole + "s";
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  return h < 24 ? `${h}h ${two(m % 60)}m` : `${Math.floor(h / 24)}d ${two(h % 24)}h`;
}
// Valid ends for an axis, whatever the data.
function axisEnds(lo, hi, log) {
  if (!(lo <= hi)) return [log ? 0.1 : 0, 1];
  const least = log ? 1e-100 : -1e290;
  lo = Math.min(1e290, Math.max(least, lo)), hi = Math.min(1e290, Math.max(least, hi));
  if (hi - lo < 1e-100 || hi - lo < 1e-9 * Math.max(Math.abs(lo), Math.abs(hi)))
    hi = lo + (Math.abs(lo) < 1e-12 ? 1e-12 : 0.1 * Math.abs(lo));
  return [lo, hi];
}
// At most n + 1 round numbers in [lo, hi]; on a logarithmic axis powers of ten, with 2 and 5 between them where it is short.
function ticks(lo, hi, n, log = false, leastStep = 0) {
  [lo, hi] = axisEnds(lo, hi, log);
  const out = [], first = Math.floor(Math.log10(lo)), last = Math.ceil(Math.log10(hi));
  if (log && Math.log10(hi / lo) > 0.7) {
    const every = Math.max(1, Math.ceil(Math.log10(hi / lo) / n)), between = last - first > 3 ? [1] : [1, 2, 5];
    for (let e = first; e <= last; e += every)
      for (const m of between) {
        const v = m * 10 ** e;
        if (v >= lo * (1 - 1e-9) && v <= hi * (1 + 1e-9)) out.push(v);
      }
    return out;
  }
  const least = Math.max((hi - lo) / n, 1e-300), power = 10 ** Math.floor(Math.log10(least));
  const step = Math.max(leastStep, power * ([1, 2, 5].find(m => m * power >= least * (1 - 1e-9)) || 10));
  for (let k = Math.ceil(lo / step - 1e-6) + 0; k * step <= hi + 1e-6 * step && out.length <= n; k++) out.push(k * step);
  return out;
}
// Gaussian average; its width is this share of the curve's length, less near the start, so that the first fall stays steep.
function smooth(x, y, share) {
  const length = x[x.length - 1] - x[0];
  let from = 0;
  return share <= 0 ? y : x.map((at, k) => {
    const sigma = Math.max(1e-9, Math.min(share * length, 0.08 * (at - x[0])));
    while (x[from] < at - 3 * sigma) from++;
    let sum = 0, weights = 0;
    for (let i = from; i < x.length && x[i] <= at + 3 * sigma; i++) {
      const weight = Math.exp(-0.5 * ((x[i] - at) / sigma) ** 2);
      sum += weight * y[i], weights += weight;
    }
    return weights > 0 ? sum / weights : y[k];
  });
}
// The first index whose x is not below the given one.
function indexOf(xs, x) {
  let lo = 0, hi = xs.length;
  while (lo < hi) { const m = (lo + hi) >> 1; if (xs[m] < x) lo = m + 1; else hi = m; }
  return lo;
}
function nearest(xs, x) {
  const i = indexOf(xs, x);
  return i === xs.length || (i > 0 && x - xs[i - 1] <= xs[i] - x) ? i - 1 : i;
}
// Interpolates a quantity that grows with the steps and is 0 before the first.
function interpolate(xs, ys, x) {
  const i = indexOf(xs, x);
  if (i === 0) return xs[0] > 0 ? ys[0] * x / xs[0] : ys[0];
  if (i === xs.length) return ys[i - 1];
  return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1]);
}
// The x coordinates of a series in steps, tokens or seconds; null if its run does not have them.
function abscissa(page, series, unit) {
  const steps = page.x[series.x], known = page.runs[series.run][unit];
  if (unit === "step") return steps;
  return known ? steps.map(x => interpolate(page.x[known.x], known.y, x)) : null;
}
// Lowest and highest value of the curves between two x; the given share at each curve's start may not raise the maximum.
function valueRange(curves, from, to, skip) {
  const range = share => {
    let lo = Infinity, hi = -Infinity;
    for (const c of curves) {
      const n = c.x.length, start = n < 50 ? -Infinity : c.x[0] + share * (c.x[n - 1] - c.x[0]);
      for (let i = 0; i < n; i++)
        if (c.x[i] >= from && c.x[i] <= to && c.x[i] >= start)
          lo = Math.min(lo, c.low[i], c.y[i]), hi = Math.max(hi, c.high[i], c.y[i]);
    }
    return [lo, hi];
  };
  const all = range(0), [lo, hi] = range(skip);
  return all[1] - lo < 1.3 * (hi - lo) || !(lo <= hi) ? all : [lo, hi];
}
// One line per bucket of a curve. Text that a spreadsheet would take for a formula is quoted.
function csv(page, chart) {
  const field = v => /^[=+\-@\t\r]/.test(v) ? field("'" + v) : /[",\r\n]/.test(v) ? `"${v.replace(/"/g, '""')}"` : v;
  const lines = ["run,series,step,tokens,seconds,mean,lowest,highest"];
  for (const s of chart.series) {
    const [tokens, seconds] = ["tokens", "seconds"].map(unit => abscissa(page, s, unit));
    page.x[s.x].forEach((step, i) => lines.push([field(page.runs[s.run].name), field(s.name || s.style), step,
      tokens ? Math.round(tokens[i]) : "", seconds ? +seconds[i].toFixed(3) : "", s.y[i],
      (s.low || s.y)[i], (s.high || s.y)[i]].join()));
  }
  return lines.join("\n") + "\n";
}
// ---- the page ----
const find = (selector, where = document) => where.querySelector(selector);
const escape = text => text.replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const units = {step: v => "step " + Math.round(v).toLocaleString("en"), tokens: v => number(v) + " tokens", seconds: duration};
// The reader's settings. They are kept in the address, so they survive the reloads of a page whose run is on.
const view = {unit: "step", smooth: 4, logx: false, from: null, to: null, y: {}, log: {}, hidden: [], open: []};
try { Object.assign(view, JSON.parse(decodeURIComponent(location.hash.slice(1)))); } catch { /* an address of another kind */ }
if (!units[view.unit] || !page.runs.some(r => view.unit === "step" || r[view.unit])) view.unit = "step";
const remember = () => location.replace("#" + encodeURIComponent(JSON.stringify(view)));
let touched = -Infinity, drag = null;  // time of the reader's last action; start of a drag

const shown = c => c.curves.filter(s => !view.hidden.includes(s.key));
const inUnit = step => view.unit === "step" ? step
  : interpolate(page.x[page.runs[0][view.unit].x], page.runs[0][view.unit].y, step);

// The curves of a chart at the view's unit and smoothing.
function prepare(c) {
  c.curves = [];
  c.series.forEach((s, index) => {
    const x = abscissa(page, s, view.unit), y = s.smooth ? smooth(page.x[s.x], s.y, view.smooth * 0.0025) : s.y;
    const key = page.runs.length > 1 ? page.runs[s.run].name : c.id + "/" + s.name;
    if (x && x.length) c.curves.push({...s, index, x, y, key, low: s.low || y, high: s.high || y});
  });
}

// Maps values to coordinates in a picture of this size.
function frameOf(c, width, height) {
  let first = Infinity, last = -Infinity;
  for (const chart of page.charts)  // all charts share one x axis
    for (const s of shown(chart)) first = Math.min(first, s.x[0]), last = Math.max(last, s.x[s.x.length - 1]);
  if (view.logx) first = Math.max(first, last / 1e6);
  else if (first < 0.05 * last) first = Math.min(first, 0);
  let [x0, x1] = view.from === null ? axisEnds(first, last, view.logx) : [view.from, view.to];
  if (view.unit === "step" && view.from === null) x1 = Math.max(x1, x0 + 1);
  const log = view.log[c.id] ?? c.log, curves = shown(c);
  let [lo, hi] = valueRange(curves.filter(s => !s.pale), x0, x1, view.from === null && !view.logx && !log ? c.skip : 0);
  if (c.base !== null && view.from === null) lo = Math.min(lo, c.base), hi = Math.max(hi, c.base);
  if (log) {
    const least = Math.min(...curves.map(s => s.low.reduce((a, v) => v > 0 && v < a ? v : a, Infinity)));
    [lo, hi] = axisEnds(Math.max(lo, least), hi, true), lo /= 1.05, hi *= 1.05;
  } else {
    if (c.zero) lo = Math.min(lo, 0);
    [lo, hi] = axisEnds(lo, hi);
    const margin = 0.05 * (hi - lo);
    lo -= c.zero && lo === 0 ? 0 : margin, hi += margin;
  }
  [lo, hi] = view.y[c.id] || [lo, hi];
  const labels = ticks(lo, hi, Math.max(3, Math.floor(height / 44)), log);
  const left = 16 + 7 * Math.max(3, ...labels.map(v => number(v).length)), right = width - 16, top = 12, bottom = height - 28;
  const part = (v, from, to, log) => Math.max(-1, Math.min(2, log ? Math.log(Math.max(v, 1e-300) / from) / Math.log(to / from)
    : (v - from) / (to - from)));
  const back = (p, from, to, log) => log ? from * (to / from) ** p : from + p * (to - from);
  return {left, right, top, bottom, x0, x1, log, labels, x: v => left + (right - left) * part(v, x0, x1, view.logx),
    y: v => bottom - (bottom - top) * part(v, lo, hi, log), xAt: px => back((px - left) / (right - left), x0, x1, view.logx),
    yAt: py => back((bottom - py) / (bottom - top), lo, hi, log)};
}

function draw(c) {
  const width = Math.max(240, Math.round(c.svg.getBoundingClientRect().width));
  const height = c === page.charts[0] ? Math.round(Math.max(240, Math.min(400, width / 2.8))) : 220;
  const f = c.frame = frameOf(c, width, height), at = v => v.toFixed(1);
  const [, scale, suffix] = view.unit !== "seconds" ? [0, 1, ""]
    : [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "m"], [-1, 1, "s"]].find(([from]) => f.x1 - f.x0 > from);
  const text = (x, y, anchor, words) =>
    `<text class="tick" x="${at(x)}" y="${at(y)}" text-anchor="${anchor}">${escape(words)}</text>`;
  let out = `<clipPath id="clip-${c.id}"><rect x="${f.left - 5}" y="${f.top - 4}" width="${f.right - f.left + 10}" ` +
    `height="${f.bottom - f.top + 4}"/></clipPath>`;
  for (const v of f.labels)
    out += `<path class="grid" d="M${f.left} ${at(f.y(v))}H${f.right}"/>` + text(f.left - 8, f.y(v) + 4, "end", number(v));
  const parts = Math.max(4, Math.floor(width / 110));
  for (const v of ticks(f.x0 / scale, f.x1 / scale, parts, view.logx, view.unit === "step" ? 1 : 0)) {
    const x = f.x(v * scale), words = number(v) + suffix;
    out += `<path class="axis" d="M${at(x)} ${f.bottom}v5"/>` +
      text(Math.min(x, width - 4 - 3.5 * words.length), f.bottom + 19, "middle", words);
  }
  out += text(f.right, f.bottom - 6, "end", {step: "step", tokens: "tokens", seconds: "time"}[view.unit]);
  out += `<path class="axis" d="M${f.left} ${f.bottom}H${f.right}"/><g clip-path="url(#clip-${c.id})">`;
  if (c.base !== null) out += `<path class="line baseline" d="M${f.left} ${at(f.y(c.base))}H${f.right}"/>`;
  for (const [row, [step, word]] of c.notes.entries()) {
    const x = f.x(inUnit(step)), atEnd = x > f.right - 80;
    out += `<path class="note" d="M${at(x)} ${f.top}V${f.bottom}"/>` +
      text(x + (atEnd ? -5 : 5), f.bottom - 8 - 15 * (row % 3), atEnd ? "end" : "start", word);
  }
  for (const pale of [true, false])
    for (const s of shown(c)) {
      if (pale ? !(s.pale || s.smooth) : s.pale) continue;
      const points = ys => s.x.map((v, i) => at(f.x(v)) + " " + at(f.y(ys[i])));
      const corner = i => s.steps && i ? `${at(f.x(s.x[i]))} ${at(f.y(s.y[i - 1]))}L` : "";
      const line = pale ? [...points(s.low), ...points(s.high).reverse()] : points(s.y).map((p, i) => corner(i) + p);
      out += `<path class="${pale ? "pale" : "line"} ${s.style}" d="M${line.join("L")}"/>`;
      if (!pale && (s.x.length === 1 || (s.dots && s.x.length <= 80)))  // a line of one point would be invisible
        s.x.forEach((v, i) => { out += `<circle class="dot ${s.style}" cx="${at(f.x(v))}" cy="${at(f.y(s.y[i]))}" r="3"/>`; });
    }
  for (const step of c.marks)
    out += `<path class="mark" d="M${at(f.x(inUnit(step)))} ${f.top + 5}l-4 -7h8z">` +
      `<title>step ${step}: not finite</title></path>`;
  c.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  c.svg.innerHTML = out + `</g><rect class="chosen"/><g class="cursor" visibility="hidden">` +
    `<path d="M0 ${f.top}V${f.bottom}"/>` +
    shown(c).map(s => s.name ? `<circle class="dot ${s.style}" r="4"/>` : "").join("") + "</g>";
  for (const key of c.figure.querySelectorAll("[data-toggle]"))
    key.setAttribute("aria-pressed", shown(c).some(s => s.index === +key.dataset.toggle));
  find("[data-do=log]", c.figure).setAttribute("aria-pressed", f.log);
}
function drawAll() {
  page.charts.forEach(draw);
  find("#whole").disabled = view.from === null && !Object.keys(view.y).length;
  hide();
}
function change(how) {
  Object.assign(view, how);
  remember();
  find("#smoothed").value = view.smooth ? view.smooth / 4 + "%" : "none";
  page.charts.forEach(prepare);
  drawAll();
}
const whole = () => change({from: null, to: null, y: {}});

// One cursor for all charts: the values at its step replace the last ones in the captions.
function show(x) {
  for (const c of page.charts) {
    const f = c.frame, cursor = find(".cursor", c.svg), dots = cursor.querySelectorAll("circle");
    cursor.setAttribute("visibility", "visible");
    find("path", cursor).setAttribute("transform", `translate(${f.x(x)})`);
    find(".at", c.figure).textContent = units[view.unit](x);
    shown(c).filter(s => s.name).forEach((s, k) => {
      const i = nearest(s.x, x), y = f.y(s.y[i]), px = f.x(s.x[i]);
      find(`[data-series="${s.index}"]`, c.figure).textContent = number(s.y[i], c.digits, 4);
      dots[k].setAttribute("cx", px), dots[k].setAttribute("cy", y);
      const inside = y >= f.top - 4 && y <= f.bottom && px >= f.left && px <= f.right + 5;
      dots[k].setAttribute("visibility", inside ? "inherit" : "hidden");
    });
  }
}
function hide() {
  for (const c of page.charts) {
    find(".cursor", c.svg).setAttribute("visibility", "hidden");
    find(".at", c.figure).textContent = "";
    for (const s of c.curves)
      if (s.name) find(`[data-series="${s.index}"]`, c.figure).textContent = number(s.y[s.y.length - 1], c.digits, 4);
  }
}

// Dragging sideways zooms the x axis of all charts, up or down this chart's y axis, diagonally both.
function listen(c) {
  const place = e => {
    const box = c.svg.getBoundingClientRect(), f = c.frame, clip = (v, a, b) => Math.max(a, Math.min(b, v));
    return [clip(e.clientX - box.left, f.left, f.right), clip(e.clientY - box.top, f.top, f.bottom)];
  };
  const chosen = e => {
    const f = c.frame, [x, y] = place(e), wide = Math.abs(x - drag[0]) > 12, high = Math.abs(y - drag[1]) > 24;
    return {wide, high, x: wide ? [drag[0], x].sort((a, b) => a - b) : [f.left, f.right],
      y: high ? [drag[1], y].sort((a, b) => a - b) : [f.top, f.bottom]};
  };
  const frame = ({x, y}, on) => {
    for (const [name, v] of [["x", x[0]], ["y", y[0]], ["width", on ? x[1] - x[0] : 0], ["height", y[1] - y[0]]])
      find(".chosen", c.svg).setAttribute(name, v);
  };
  c.svg.addEventListener("pointerdown", e => {
    if (e.button !== 0) return;
    drag = place(e);
    c.svg.setPointerCapture(e.pointerId);
  });
  c.svg.addEventListener("pointermove", e => {
    touched = performance.now();
    if (drag) frame(chosen(e), chosen(e).wide || chosen(e).high);
    show(c.frame.xAt(place(e)[0]));
  });
  c.svg.addEventListener("pointerup", e => {
    if (!drag) return;
    const {wide, high, x, y} = chosen(e), f = c.frame, how = {};
    drag = null;
    if (wide) how.from = f.xAt(x[0]), how.to = f.xAt(x[1]);
    if (high) how.y = {...view.y, [c.id]: [f.yAt(y[1]), f.yAt(y[0])]};
    if (wide || high) change(how);
  });
  c.svg.addEventListener("pointercancel", () => { drag = null; drawAll(); });
  c.svg.addEventListener("pointerleave", () => { if (!drag) hide(); });
  c.svg.addEventListener("dblclick", whole);
  c.svg.addEventListener("keydown", e => {
    const f = c.frame, middle = (f.left + f.right) / 2;
    const go = {ArrowLeft: -1, ArrowRight: 1}[e.key], by = {"+": 0.25, "-": 1}[e.key];
    touched = performance.now();
    if (go) c.key = Math.max(f.left, Math.min(f.right, (c.key ?? middle) + go * (f.right - f.left) / 100)), show(f.xAt(c.key));
    else if (by) {
      const px = c.key ?? middle, reach = by * (f.right - f.left);
      change({from: f.xAt(Math.max(px - reach, view.logx ? f.left : -Infinity)), to: f.xAt(px + reach)}), c.key = null;
    } else if (e.key === "Escape" || e.key === "0") whole();
    else return;
    find(".keys", c.figure).setAttribute("aria-live", "polite");
    e.preventDefault();
  });
  for (const key of c.figure.querySelectorAll("[data-toggle]"))
    key.addEventListener("click", () => {
      const name = c.curves.find(s => s.index === +key.dataset.toggle)?.key, others = view.hidden.filter(n => n !== name);
      change({hidden: others.length < view.hidden.length ? others : [...others, name]});
    });
  find("[data-do=log]", c.figure).addEventListener("click", () => {
    const {[c.id]: gone, ...others} = view.y;
    change({log: {...view.log, [c.id]: !c.frame.log}, y: others});
  });
  find("[data-do=csv]", c.figure).addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv(page, c)], {type: "text/csv"}));
    link.download = `${c.id}.csv`;
    link.click();
  });
  find(".tools", c.figure).hidden = false;
  c.svg.tabIndex = 0;
}
if (page.charts.length) {
  document.body.classList.add("live");
  find(".controls").hidden = false;
  const on = (id, key, value) => {
    const control = find(id);
    control[value] = view[key];
    control.addEventListener("input", () => change({[key]: value === "valueAsNumber" ? +control.value : control[value],
      ...(key === "smooth" ? {} : {from: null, to: null})}));
  };
  for (const option of find("#unit").options)
    option.disabled = option.value !== "step" && !page.runs.some(r => r[option.value]);
  on("#unit", "unit", "value"), on("#logx", "logx", "checked"), on("#smooth", "smooth", "valueAsNumber");
  find("#whole").addEventListener("click", whole);
  for (const c of page.charts) c.svg = document.getElementById(c.id), c.figure = c.svg.closest("figure"), listen(c);
  page.charts.forEach(prepare), drawAll();
  find("#smoothed").value = view.smooth ? view.smooth / 4 + "%" : "none";
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) width = innerWidth, drawAll(); });
}
const parts = [...document.querySelectorAll("details")];
parts.forEach((details, i) => {
  details.open = view.open.includes(i);
  details.addEventListener("toggle", () => { view.open = parts.flatMap((d, i) => d.open ? [i] : []), remember(); });
});
// A page that was not rewritten for long belongs to a killed run, which cannot report it: decided by this clock.
const updated = find("#updated"), badge = find("header .status.running");
const listenForNews = () => {
  const silence = Date.now() / 1000 - updated.dataset.time;
  if (silence <= updated.dataset.silence) return;
  badge.textContent = "no news", badge.className = "status silent", updated.classList.add("stale");
  updated.textContent = updated.textContent.split(" No news")[0] + ` No news for ${Math.floor(silence / 60)} minutes.`;
};
if (updated && badge) listenForNews(), setInterval(listenForNews, 10000);
// During the run the page reloads itself, but not while the reader is using it.
if (refreshSeconds) setInterval(() => {
  if (!drag && !document.hidden && !String(getSelection()) && performance.now() - touched > 5000) location.reload();
}, refreshSeconds * 1000);
)js";
