#!/usr/bin/env bash
# A user's actions on the page of `train_gpt serve`, in headless Chromium, at the width of a phone and of a desktop: a text
# is continued, a conversation held, an error shown. Prints `ok: NAME` or `FAILED: NAME` per test; without Chromium it says
# so and exits with 0.
#   dev/interop/serve_in_browser.sh BUILD      a folder with train_gpt
set -u
failed=0 program=$(realpath "$1/train_gpt")
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || { echo "skipped: there is no Chromium"; exit 0; }
work=$(mktemp -d) server=
trap '[[ -z $server ]] || kill "$server"; rm -rf "$work"' EXIT
cd "$work" || exit 1
for i in $(seq 60); do echo "{\"messages\": [{\"role\": \"user\", \"content\": \"city $i?\"}, {\"role\": \"assistant\", \"content\": \"the king\"}]}"; done >chat.jsonl
{
    "$program" tokenizer --input chat.jsonl --format text --vocab-size 300 --output tok &&
        "$program" prepare --input chat.jsonl --output chat --tokenizer tok --chat --chat-template plain &&
        "$program" train --hidden-size 32 --num-layers 1 --num-attention-heads 2 --tokenizer tok --data-path chat --seq-length 48 --micro-batch-size 2 \
            --train-iters 60 --lr 1e-2 --eval-iters 0 --split "1, 0, 0" --out talks
} >log.txt 2>&1 || { echo "FAILED: no model"; tail log.txt; exit 1; }
"$program" serve --model talks --port 0 >serve.txt 2>&1 &
server=$!
for _ in $(seq 100); do grep -q http serve.txt && break; sleep 0.1; done
address=$(grep -o 'http://[0-9.:]*' serve.txt | head -n 1)
cat >script.html <<'END'
<script>
const lines = [], test = (name, right) => lines.push((right ? "ok: " : "FAILED: ") + name);
const box = id => at(id).getBoundingClientRect(), last = () => at("text").lastElementChild;
const narrow = () => test("the page is not wider than the window", document.documentElement.scrollWidth <= innerWidth);
const say = async text => { at("prompt").value = text; at("tokens").value = 8; at("temperature").value = 0; await write(); };
const tests = async () => {
  while (at("chats").hidden) await new Promise(next => setTimeout(next, 50));
  test("the model's name", at("model").textContent === "talks");
  test("a conversation is offered", at("chat").checked && at("prompt").placeholder === "Message");
  const numbers = ["tokens", "temperature", "top_p"].map(box);
  test("the numbers stand in one row", numbers.every(b => b.top === numbers[0].top && b.width > 60));
  await say("city 7?");
  test("an answer", last().className === "written" && last().textContent.trim() === "the king");
  test("the field is empty again", at("prompt").value === "" && !at("go").disabled && at("stop").disabled);
  await say("city ".repeat(60));
  test("what is too long is refused", last().className === "error" && /context/.test(last().textContent));
  test("and can be mended", at("prompt").value.startsWith("city city") && messages.length === 2);
  narrow();
  at("chat").click();
  test("a text to continue", at("prompt").placeholder === "Text to continue" && at("text").childElementCount === 0);
  await say("city 3?");
  test("is continued", at("text").firstElementChild.textContent === "city 3?" && last().textContent.length > 3);
  narrow();
  document.body.textContent = "\n" + lines.join("\n") + "\n";
};
tests();
</script>
END
python3 - "$address" >page.html <<'END' || { echo "FAILED: no page"; cat serve.txt; exit 1; }
import sys, urllib.request
page = urllib.request.urlopen(sys.argv[1] + "/").read().decode()
print(page.replace("<head>", f'<head><base href="{sys.argv[1]}/">').replace("</body>", open("script.html").read() + "</body>"))
END
for width in 390 1440; do
    timeout 90 "$browser" --headless --no-sandbox --disable-gpu --disable-web-security --user-data-dir="$work/profile" --window-size=$width,900 \
        --virtual-time-budget=60000 --dump-dom "file://$work/page.html" 2>/dev/null | grep -E '^(ok|FAILED): ' | sed "s/: /: page at $width pixels: /" >out.txt
    cat out.txt
    if grep -q ^FAILED out.txt; then failed=1; fi
    [[ $(grep -c '' out.txt) == 11 ]] || { echo "FAILED: page at $width pixels: its tests have not come to an end"; failed=1; }
done
exit $failed
