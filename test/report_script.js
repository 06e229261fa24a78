// The functions of the script in report.html that need no page: `node test/report_script.js report.html`, with the report of a
// run. Prints `ok: NAME` or `FAILED: NAME` per test.
const assert = require("assert");
const html = require("fs").readFileSync(process.argv[2], "utf8");
const script = html.slice(html.indexOf("<script>") + 8, html.indexOf("// ---- the page ----"));
const names = "page, number, duration, axisEnds, ticks, smooth, nearest, interpolate, abscissa, valueRange, csv";
const {page, number, duration, axisEnds, ticks, smooth, nearest, interpolate, abscissa, valueRange, csv} =
  new Function(script + `return {${names}};`)();
const hostile = [0, -0, 1, 1 + 1e-15, -1, 6.05, 1e-13, 1e-300, 5e-324, 1e9, 1e9 + 1, 9e15, 1e100, -1e100, 1e308, -1e308,
  Infinity, -Infinity, NaN];

const tests = {
  "numbers as in the pictures": () => {
    for (const [v, text] of [[0, "0"], [3e-4, "3e-4"], [1.59e-3, "1.59e-3"], [2e-10, "2e-10"], [0.25, "0.25"], [-1.5, "-1.5"],
      [12000, "12,000"], [150000, "150K"], [1e6, "1M"], [NaN, "-"]]) assert.equal(number(v), text);
    assert.equal(number(2.5, 3), "2.500");
    for (const v of hostile) assert(number(v).length < 16, number(v));
  },
  "durations": () => {
    for (const [s, text] of [[0, "0s"], [4.24, "4.2s"], [9.97, "10s"], [59.4, "59s"], [59.6, "1m 00s"], [725, "12m 05s"],
      [3599.6, "1h 00m"], [3720, "1h 02m"], [86390, "1d 00h"], [273600, "3d 04h"]])
      assert.equal(duration(s), text);
  },
  "ticks are few, finite and in order, whatever the ends": () => {
    assert.deepEqual(ticks(2.7, 6.6, 5), [3, 4, 5, 6]);
    assert.deepEqual(ticks(0.15, 12, 5, true), [0.2, 0.5, 1, 2, 5, 10]);
    for (const lo of hostile)
      for (const hi of hostile)
        for (const log of [false, true]) {
          const t = ticks(...axisEnds(lo, hi, log), 5, log);
          assert(t.length <= 13, `${lo} ${hi} ${t}`);
          t.forEach((v, i) => assert(Number.isFinite(v) && (i === 0 || v > t[i - 1]), `${lo} ${hi} ${t}`));
        }
  },
  "smoothing keeps a constant and flattens noise": () => {
    const x = [...Array(700).keys()], noise = x.map(i => i % 2);
    smooth(x, x.map(() => 3.5), 0.05).forEach(v => assert(Math.abs(v - 3.5) < 1e-12));
    smooth(x, noise, 0.05).slice(50).forEach(v => assert(Math.abs(v - 0.5) < 0.01));
    assert.equal(smooth(x, noise, 0), noise);
    assert.deepEqual(smooth([], [], 0.01), []);
    assert.deepEqual(smooth([7], [2], 0.01), [2]);
  },
  "between the points": () => {
    assert.deepEqual([-5, 1.4, 1.6, 99].map(x => nearest([1, 2, 3], x)), [0, 0, 1, 2]);
    assert.deepEqual([1, 2, 3, 9].map(x => interpolate([2, 4], [10, 30], x)), [5, 10, 20, 30]);
  },
  "the range leaves out the first fall only": () => {
    const x = [...Array(100).keys()], y = x.map(i => i < 3 ? 100 : i === 60 ? 9 : 5), curve = {x, y, low: y, high: y};
    assert.deepEqual(valueRange([curve], 0, 99, 0.04), [5, 9]);
    assert.deepEqual(valueRange([curve], 0, 99, 0), [5, 100]);
    assert.deepEqual(valueRange([curve], 50, 55, 0), [5, 5]);
  },
  "a table of a chart": () => {
    const [head, first, ...others] = csv(page, page.charts[0]).trim().split("\n");
    assert.equal(head, "run,series,step,tokens,seconds,mean,lowest,highest");
    assert.equal(first.split(",").length, 8);
    assert(Number(first.split(",")[3]) > 0 && others.length > 0);
    const odd = {runs: [{name: "=1+1,\"x\"\ny"}], x: [[1, 2]]};
    assert.equal(csv(odd, {series: [{run: 0, name: "@s", style: "", x: 0, y: [3, 4]}]}),
      `${head}\n"'=1+1,""x""\ny",'@s,1,,,3,3,3\n"'=1+1,""x""\ny",'@s,2,,,4,4,4\n`);
  },
  "tokens and time at the steps": () => {
    for (const unit of ["tokens", "seconds"]) {
      const x = abscissa(page, page.charts[0].series[0], unit);
      assert.equal(x.length, page.x[page.charts[0].series[0].x].length);
      x.forEach((v, i) => assert(v >= 0 && (i === 0 || v >= x[i - 1])));
    }
    assert.equal(abscissa({runs: [{}], x: [[1]]}, {run: 0, x: 0}, "tokens"), null);
  },
};
for (const [name, test] of Object.entries(tests)) {
  try { test(), console.log("ok: " + name); }
  catch (error) { console.log("FAILED: " + name), console.log(error.message), process.exitCode = 1; }
}
