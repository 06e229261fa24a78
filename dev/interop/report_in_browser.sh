#!/usr/bin/env bash
# A reader's actions on a report, in headless Chromium: drags, double clicks, keys, axes, smoothing, CSV, at the width of a
# phone and of a desktop. Prints `ok: NAME` or `FAILED: NAME` per test; without Chromium it says so and exits with 0.
#   dev/interop/report_in_browser.sh BUILD      a folder with train_gpt
set -u
failed=0
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || { echo "skipped: there is no Chromium"; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
    echo '{"kind":"run","name":"a run","total_steps":300,"unigram_loss":7}'
    seq 300 | awk '{ printf "{\"kind\":\"step\",\"step\":%d,\"tokens\":%d,\"loss\":%g,\"lr\":%g,\"seconds\":%g}\n", $1, 4096 * $1,
                     2 + 6 / $1 + $1 % 7 / 20, $1 / 1e5, $1 * 20 }'
} >"$work/log.jsonl"
"$1/train_gpt" report "$work" --output "$work/page.html" >/dev/null || { echo "FAILED: no report"; exit 1; }
cat >>"$work/page.html" <<'END'
<script>
const lines = [], all = selector => [...document.querySelectorAll(selector)];
const test = (name, right) => lines.push((right ? "ok: " : "FAILED: ") + name);
const loss = page.charts[0], box = () => loss.svg.getBoundingClientRect(), ticks_x = () => all("#lr .tick").map(t => t.textContent).join(" ");
const at = (type, x, y) => loss.svg.dispatchEvent(new PointerEvent(type, {clientX: box().left + x * box().width,
  clientY: box().top + y, pointerId: 1, button: 0, bubbles: true}));
const set = (id, value, key = "value") => { const e = find(id); e[key] = value, e.dispatchEvent(new Event("input")); };
loss.svg.setPointerCapture = () => {};  // there is no pointer of flesh
test("the page is not wider than the window", document.documentElement.scrollWidth <= innerWidth);
test("letters have the size they were given", loss.svg.viewBox.baseVal.width === Math.round(box().width));
const whole_run = ticks_x(), length = loss.frame.x1 - loss.frame.x0;
at("pointermove", 0.5, 60);
test("values under the cursor", /^step /.test(find(".at", loss.figure).textContent) && /[0-9]/.test(find("#lr").closest("figure").querySelector("b").textContent));
at("pointerdown", 0.4, 60), at("pointermove", 0.6, 62), at("pointerup", 0.6, 62);
test("dragging zooms all charts", loss.frame.x1 - loss.frame.x0 < 0.3 * length && page.charts.every(c => c.frame.x0 === loss.frame.x0));
test("the zoom is in the address", JSON.parse(decodeURIComponent(location.hash.slice(1))).from === loss.frame.x0);
at("dblclick", 0.5, 60);
test("a double click goes back", ticks_x() === whole_run);
const top_value = loss.frame.yAt(loss.frame.top);
at("pointerdown", 0.5, 60), at("pointermove", 0.5, 120), at("pointerup", 0.5, 120);
test("dragging down zooms the values", loss.frame.yAt(loss.frame.top) < top_value && ticks_x() === whole_run);
loss.svg.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
loss.svg.dispatchEvent(new KeyboardEvent("keydown", {key: "+"}));
test("plus zooms", loss.frame.x1 - loss.frame.x0 < 0.6 * length);
loss.svg.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
test("escape goes back", ticks_x() === whole_run);
set("#unit", "tokens");
test("x in tokens", loss.frame.x1 > 10 * length);
set("#unit", "seconds");
test("x in time", /[0-9][smhd]$/.test(ticks_x()));
set("#unit", "step");
const line = () => find(`#loss .line.train`).getAttribute("d"), before = line();
set("#smooth", 0, "valueAsNumber");
test("without smoothing", line() !== before && find("#smoothed").value === "none");
set("#logx", true, "checked");
test("logarithmic x", loss.frame.x0 > 0 && ticks_x() !== whole_run);
find("[data-do=log]", loss.figure).click();
test("logarithmic values", loss.frame.log && find("[data-do=log]", loss.figure).getAttribute("aria-pressed") === "true");
find("[data-toggle]", loss.figure).click();
test("a curve is hidden", !find("#loss .line.train"));
HTMLAnchorElement.prototype.click = function () { test("a CSV file", this.download === "loss.csv" && this.href.startsWith("blob:")); };
find("[data-do=csv]", loss.figure).click();
document.body.textContent = "\n" + lines.join("\n") + "\n";
</script>
END
for width in 390 1440; do
    timeout 60 "$browser" --headless --no-sandbox --disable-gpu --user-data-dir="$work/profile" --window-size=$width,900 --dump-dom \
        "file://$work/page.html" 2>/dev/null | grep -E '^(ok|FAILED): ' | sed "s/: /: at $width pixels: /" >"$work/out.txt"
    cat "$work/out.txt"
    if grep -q ^FAILED "$work/out.txt"; then failed=1; fi
    [[ $(grep -c '' "$work/out.txt") == 16 ]] || { echo "FAILED: at $width pixels: the page's tests have not come to an end"; failed=1; }
done
exit $failed
