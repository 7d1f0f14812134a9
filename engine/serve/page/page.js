"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const element = (name, classes, text) => {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
};
const recall = (key, otherwise) => { try { return JSON.parse(localStorage.getItem(key)) ?? otherwise; } catch { return otherwise; } };
const keep = (key, value) => { try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* private windows keep nothing */ } };

// ---- asking the server

let apiKey = "";
try { apiKey = sessionStorage.getItem("twostroke.key") ?? ""; } catch { /* it is asked for again */ }

async function ask(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...(apiKey ? { authorization: `Bearer ${apiKey}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let problem = {};
  try { problem = (await response.json()).error ?? {}; } catch { /* no JSON: the status says it */ }
  if (response.status === 401) $("key-form").hidden = false;
  throw Object.assign(new Error(problem.message ?? `the server answered ${response.status}`), { code: problem.code, status: response.status });
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = $("key").value;
  try { sessionStorage.setItem("twostroke.key", apiKey); } catch { /* for this page only, then */ }
  $("key-form").hidden = true;
  $("prompt").focus();
});

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.search(/\r?\n\r?\n/)) >= 0;) {
      const lines = rest.slice(0, end).split(/\r?\n/);
      rest = rest.slice(end).replace(/^\r?\n\r?\n/, "");
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), { code: chunk.error.code });
      yield chunk;
    }
  }
}

// ---- settings

const SLIDERS = [
  ["temperature", 0, 2, 0.05, 0.7], ["top_p", 0.05, 1, 0.01, 0.95], ["top_k", 0, 200, 1, 40], ["min_p", 0, 0.5, 0.01, 0],
  ["repetition_penalty", 0.8, 1.5, 0.01, 1.1], ["max_tokens", 16, 2048, 16, 256],
];
const chosen = recall("twostroke.sampling", {});
for (const [name, low, high, step, start] of SLIDERS) {
  const row = element("div", "slider"), label = element("label", "", name.replace("repetition_", "repeat "));
  const input = Object.assign(element("input"), { type: "range", id: name, min: low, max: high, step });
  input.value = chosen[name] ?? start;
  const output = element("output", "", input.value);
  label.htmlFor = output.htmlFor = name;
  input.addEventListener("input", () => {
    output.textContent = input.value;
    keep("twostroke.sampling", Object.fromEntries(SLIDERS.map(([each]) => [each, Number($(each).value)])));
  });
  row.append(label, input, output);
  $("sliders").append(row);
}

const FORMAT_HINTS = {
  json_schema: '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
  guided_regex: "[0-9]{1,4}", guided_choice: "yes\nno", guided_grammar: 'root ::= "yes" | "no"',
};
$("format").addEventListener("change", () => {
  const hint = FORMAT_HINTS[$("format").value];
  $("format-text").hidden = !hint;
  $("format-text").placeholder = hint ?? "";
});

function formatFields() {
  const kind = $("format").value, text = $("format-text").value || FORMAT_HINTS[kind];
  if (!kind) return {};
  if (kind === "json_object") return { response_format: { type: kind } };
  if (kind === "guided_choice") return { guided_choice: text.split("\n").filter((line) => line) };
  if (kind !== "json_schema") return { [kind]: text };
  try {
    return { response_format: { type: kind, json_schema: { name: "answer", schema: JSON.parse(text) } } };
  } catch (error) {
    throw new Error(`the schema is no JSON: ${error.message}`, { cause: error });
  }
}

const THEMES = ["auto", "light", "dark"];
function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  $("theme").textContent = `Colours: ${name}`;
  $("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
  keep("twostroke.theme", name);
}
setTheme(THEMES.includes(recall("twostroke.theme", "auto")) ? recall("twostroke.theme", "auto") : "auto");
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3]));

// ---- the conversation

let messages = [], running = null, hasTemplate = true;

function show(role, text) {
  const shown = element("article", `message ${role}`);
  shown.setAttribute("aria-label", role === "user" ? "You" : "Model");
  shown.append(element("div", "text", text));
  $("log").append(shown);
  $("log").scrollTop = $("log").scrollHeight;
  return shown;
}

function setRunning(control) {
  running = control;
  $("stop").hidden = !control;
  $("send").hidden = Boolean(control);
}

function body() {
  const settings = Object.fromEntries(SLIDERS.map(([name]) => [name, Number($(name).value)]));
  const system = $("system").value.trim();
  const conversation = system ? [{ role: "system", content: system }, ...messages] : messages;
  const what = hasTemplate ? { messages: conversation } : { prompt: conversation.map((message) => message.content).join("\n") };
  const seed = $("seed").value === "" ? {} : { seed: Number($("seed").value) };
  return { ...what, ...settings, ...seed, ...formatFields(), stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

async function generate() {
  const control = new AbortController(), shown = show("assistant", ""), text = shown.firstChild;
  const note = shown.appendChild(element("div", "note", "waiting for the first token"));
  const began = performance.now();
  let first = 0, count = 0, reason = "", answer = "";
  for (const old of document.querySelectorAll(".again")) old.remove();
  const report = (end) => {
    const now = performance.now(), seconds = (now - first) / 1000;
    const speed = count > 1 && seconds > 0 ? `${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
    note.textContent = [`${count} tokens`, speed, first && `first after ${((first - began) / 1000).toFixed(2)} s`, end].filter(Boolean).join(" · ");
  };
  shown.setAttribute("aria-busy", "true");
  setRunning(control);
  try {
    const path = hasTemplate ? "v1/chat/completions" : "v1/completions";
    const response = await ask(path, { method: "POST", body: JSON.stringify(body()), signal: control.signal });
    for await (const chunk of events(response)) {
      const choice = chunk.choices[0], part = choice?.delta?.content ?? choice?.text ?? "";
      count = chunk.usage?.completion_tokens ?? count;
      if (count && !first) first = performance.now();
      reason = choice?.finish_reason ?? reason;
      if (part) {
        const log = $("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
        answer += part;
        text.append(part);
        if (isAtEnd) log.scrollTop = log.scrollHeight;
      }
      report("");
    }
    report({ stop: "ended by itself", length: "stopped at max_tokens", tool_calls: "calls a tool" }[reason] ?? reason);
  } catch (error) {
    if (error.code === "no_chat_template" && hasTemplate) {
      hasTemplate = false;
      shown.remove();
      return await generate();
    }
    if (control.signal.aborted) report("stopped by you");
    else {
      note.className = "note failed";
      note.setAttribute("role", "alert");
      note.textContent = error.message;
    }
  } finally {
    shown.removeAttribute("aria-busy");
    if (running === control) setRunning(null);
  }
  if (!answer) text.hidden = true;
  else if (shown.isConnected) messages.push({ role: "assistant", content: answer });
  const again = note.appendChild(Object.assign(element("button", "again", "Again"), { type: "button" }));
  again.addEventListener("click", () => {
    if (running) return;
    if (answer) messages.pop();
    shown.remove();
    generate();
  });
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  if (messages.at(-1)?.role === "user") messages.pop(); // what failed is asked anew
  messages.push({ role: "user", content: text });
  show("user", text);
  generate();
}

function stop() {
  if (!running) return;
  running.abort();
  $("prompt").focus();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("stop").addEventListener("click", stop);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
$("new").addEventListener("click", () => {
  stop();
  messages = [];
  $("log").replaceChildren();
  $("prompt").focus();
});

// ---- the engine

const WINDOW_MS = 3000, EVERY_MS = 300, MINUTE = 200;
let looks = [], speeds = [];

function meter(name, share, value) {
  const row = element("div", "meter"), track = element("div", "track"), fill = element("div", "fill");
  fill.style.width = `${Math.min(100, 100 * share)}%`;
  track.append(fill);
  row.append(element("span", "", name), track, element("span", "value", value));
  return row;
}

function speedText(value) { return value >= 100 ? Math.round(value).toLocaleString() : value.toFixed(1); }

function draw(now) {
  looks.push(now);
  while (looks.length > 2 && now.seconds - looks[0].seconds > WINDOW_MS / 1000) looks.shift();
  const before = looks[0], seconds = now.seconds - before.seconds, steps = now.num_steps - before.num_steps;
  const speed = seconds > 0 ? (now.generated_tokens - before.generated_tokens) / seconds : 0;
  speeds = [...speeds, speed].slice(-MINUTE);
  $("model").textContent = now.model;
  document.title = `${now.model} – twostroke`;
  const state = now.is_healthy ? (now.is_paused ? "paused" : now.runner === "READY" ? "ready" : now.runner.toLowerCase()) : `down: ${now.fault}`;
  setHealth(now.is_healthy ? "good" : "bad", state);
  for (const chip of $("states").children) {
    if (chip.dataset.state === now.state) chip.setAttribute("aria-current", "step"); else chip.removeAttribute("aria-current");
  }
  const figures = {
    speed: speedText(speed), "steps-speed": speedText(seconds > 0 ? steps / seconds : 0), steps: now.num_steps.toLocaleString(),
    running: now.num_running, waiting: now.num_waiting,
    hits: now.prefix_cache_queries ? `${Math.round(100 * now.prefix_cache_hits / now.prefix_cache_queries)} %` : "–",
  };
  for (const [id, value] of Object.entries(figures)) $(id).textContent = value;
  const top = Math.max(1, ...speeds);
  const points = speeds.map((each, index) => `${(240 * (MINUTE - speeds.length + index + 1) / MINUTE).toFixed(1)},${(38 - 35 * each / top).toFixed(1)}`);
  $("spark").firstElementChild.setAttribute("points", points.join(" "));
  const use = 100 * now.kv_cache_usage;
  $("kv").setAttribute("aria-valuenow", use.toFixed(1));
  $("kv").firstElementChild.style.width = `${use}%`;
  $("kv-value").textContent = `${use.toFixed(1)} %`;
  drawStages(now, steps ? before : { stages: {}, num_steps: 0 });
  const total = now.modes.reduce((sum, mode) => sum + mode.steps, 0);
  const modes = [...now.modes].sort((one, other) => other.steps - one.steps);
  $("modes").replaceChildren(...modes.map((mode) => meter(mode.reason ? `${mode.mode}: ${mode.reason}` : mode.mode, mode.steps / total, mode.steps.toLocaleString())));
}

// Of the latest seconds while there are steps, and of all steps when there are none.
function drawStages(now, before) {
  const steps = now.num_steps - before.num_steps;
  const spent = Object.entries(now.stages).map(([name, seconds]) => [name, seconds - (before.stages[name] ?? 0)]);
  const total = spent.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total || !steps) return;
  const rows = spent.filter(([, seconds]) => 1000 * seconds / steps >= 0.005);
  $("stages").replaceChildren(...rows.map(([name, seconds]) => meter(name, seconds / total, `${(1000 * seconds / steps).toFixed(2)} ms`)));
}

function setHealth(kind, text) {
  $("health").className = `health ${kind}`;
  if ($("health").lastElementChild.textContent !== text) $("health").lastElementChild.textContent = text;
}

async function look() {
  if (!document.hidden) {
    try {
      draw(await (await ask("engine/state")).json());
    } catch (error) {
      setHealth("bad", error.status ? error.message : "no connection to the server");
      looks = [];
    }
  }
  setTimeout(look, EVERY_MS);
}
look();
})();
