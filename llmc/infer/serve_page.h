// The page that `train_gpt serve` shows at /: a text to continue, or a conversation if the model supports it. It uses the same
// API as other programs, and loads nothing from other sites.
#pragma once

inline constexpr const char* serve_page = R"html(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>train_gpt</title><style>
:root { color-scheme: light dark; }
body { max-width: 44rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.1rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
textarea { width: 100%; box-sizing: border-box; font: inherit; padding: .5rem; resize: vertical; }
fieldset { border: 0; padding: 0; margin: .5rem 0; display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: end; }
#numbers { flex: 1 1 20rem; display: flex; gap: 1rem; } #numbers label { flex: 1; min-width: 0; font-size: .85rem; }
input[type=number] { display: block; width: 100%; box-sizing: border-box; font: inherit; font-size: 1rem; padding: .3rem; }
button { font: inherit; padding: .4rem 1.2rem; } #chats { padding: .4rem 0; }
#text { white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 1rem; } #text b { display: block; margin-top: .8rem; }
.written { color: #15658a; } .error { color: #b3261e; }
@media (prefers-color-scheme: dark) { .written { color: #7cc7ec; } .error { color: #ff8a80; } }
</style></head><body>
<h1>train_gpt &middot; <span id="model"></span></h1>
<form id="form">
<textarea id="prompt" rows="5" aria-label="text to continue" placeholder="Text to continue" autofocus></textarea>
<fieldset>
<button id="go">Write</button> <button id="stop" type="button" disabled>Stop</button>
<label id="chats" hidden><input id="chat" type="checkbox" checked> conversation</label>
<span id="numbers">
<label>tokens <input id="tokens" type="number" min="1" value="200"></label>
<label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0.8"></label>
<label>top p <input id="top_p" type="number" min="0" max="1" step="0.05" value="0.95"></label>
</span></fieldset></form>
<div id="text" aria-live="polite"></div>
<script>
'use strict';
const at = id => document.getElementById(id);
let messages = [], asked = null;
const show = (kind, text, tag = 'span') => {
  const e = document.createElement(tag);
  e.className = kind; e.textContent = text; at('text').append(e);
  return e;
};
const ask = () => { at('prompt').placeholder = at('prompt').ariaLabel = at('chat').checked ? 'Message' : 'Text to continue'; };
fetch('v1/models').then(r => r.json()).then(list => {
  const model = list.data[0];
  at('model').textContent = model.id;
  at('tokens').max = model.max_new_tokens;
  at('tokens').value = Math.min(200, model.max_new_tokens);
  at('chats').hidden = !model.chat;
  at('chat').checked = model.chat;
  ask();
}).catch(e => show('error', String(e)));
const write = async () => {
  const chat = at('chat').checked, prompt = at('prompt').value;
  const body = {model: at('model').textContent, max_tokens: +at('tokens').value, temperature: +at('temperature').value,
                top_p: +at('top_p').value, stream: true};
  if (chat) {
    messages.push({role: 'user', content: prompt});
    body.messages = messages;
    show('', 'You', 'b'); show('', prompt); show('', at('model').textContent, 'b');
    at('prompt').value = '';
  } else {
    messages = []; body.prompt = prompt;
    at('text').replaceChildren(); show('', prompt);
  }
  const written = show('written', '');
  asked = new AbortController();
  at('go').disabled = true; at('stop').disabled = false;
  try {
    const answer = await fetch(chat ? 'v1/chat/completions' : 'v1/completions',
        {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body), signal: asked.signal});
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = '';;) {
      const {value, done} = await reader.read();
      if (done) break;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith('data: ') || line === 'data: [DONE]') continue;
        const choice = JSON.parse(line.slice(6)).choices[0];
        written.textContent += (chat ? choice.delta.content : choice.text) || '';
      }
    }
  } catch (e) {
    if (e.name !== 'AbortError') {
      show('error', e.message, 'div');
      if (chat && !written.textContent) { messages.pop(); at('prompt').value = prompt; }
    }
  }
  if (chat && written.textContent) messages.push({role: 'assistant', content: written.textContent});
  at('go').disabled = false; at('stop').disabled = true;
};
at('form').addEventListener('submit', e => { e.preventDefault(); write(); });
at('stop').addEventListener('click', () => asked && asked.abort());
at('chat').addEventListener('change', () => { messages = []; at('text').replaceChildren(); ask(); });
</script></body></html>
)html";
