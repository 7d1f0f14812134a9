// Everything that is not the timeline: figures, the selected step, batches, shares, modes, requests.
function showFacts() {
  const facts = Object.entries(data.facts).map(([name, value]) => `${name} ${value}`);
  byId("facts").textContent = [data.model, ...facts].filter(Boolean).join(" · ");
  const times = steps.filter((step) => step.wanted).map((step) => step.t[1] - step.t[0]).sort((a, b) => a - b);
  const figures = [["steps", count(steps.length)], ["tokens sampled", count(data.numSampled)]];
  if (data.isTimed && times.length) {
    figures.push(["tokens / s", count(Math.round(data.numSampled / (data.durationUs / 1e6)))]);
    figures.push(["median step", duration(times[times.length >> 1])]);
  }
  figures.push(["padding", percent(data.padding)]);
  if (data.numFailures) figures.push(["failures", count(data.numFailures), "bad"]);
  byId("figures").append(...figures.map(([name, value, kind]) =>
    element("div", { class: kind || "" }, element("dt", {}, name), element("dd", {}, value))));
  byId("notes").hidden = !data.notes.length;
  byId("notes").textContent = data.notes.join(" · ");
  byId("legend").append(...data.stages.map((stage, index) =>
    element("li", {}, element("i", { class: "swatch", style: { background: `var(--${colours[index]})` } }), stage.name)),
  element("li", {}, element("i", { class: "swatch prefill" }), "prompt tokens"),
  element("li", {}, element("i", { class: "swatch decode" }), "decoded tokens"));
}

function meter(name, share, value, colourName) {
  const fill = element("div", { class: "fill", style: { width: `${Math.max(share * 100, 0.3)}%`, background: `var(--${colourName})` } });
  return element("div", { class: "meter" }, element("span", {}, name),
    element("div", { class: "track" }, fill), element("span", { class: "value" }, value));
}

function showStages() {
  const inside = data.stages.reduce((sum, stage) => sum + stage.us, 0);
  const whole = Math.max(data.durationUs, inside) || 1, panel = byId("stages");
  if (!data.isTimed) {
    panel.append(element("p", { class: "lead" }, "This recording has no times."));
    return;
  }
  const numSteps = steps.filter((step) => step.s.length).length || 1;
  panel.append(element("p", { class: "lead" }, "Host time by stage: share of the whole, and mean of a step"));
  data.stages.forEach((stage, index) => panel.append(
    meter(stage.name, stage.us / whole, `${percent(stage.us / whole)} · ${duration(stage.us / numSteps)}`, colours[index])));
  const outside = Math.max(whole - inside, 0);
  panel.append(meter("outside", outside / whole, `${percent(outside / whole)} · ${duration(outside / numSteps)}`, "padding"));
}

function showModes() {
  const rows = data.modes.map(([mode, why, number, wanted, ran]) =>
    [mode || "not recorded", why, count(number), count(wanted), count(ran - wanted), percent(ran ? 1 - wanted / ran : 0)]);
  byId("modes").append(table([["mode"], ["why not higher"], ["steps", "num"], ["tokens", "num"], ["padding", "num"], ["waste", "num"]], rows));
}

function showRequests(select) {
  const rows = data.requests.map((request) => {
    const jump = element("button", { type: "button", title: "Show its first step" }, request.id);
    jump.addEventListener("click", () => select(request.first));
    const wait = request.firstTokenUs === null ? "–" : data.isTimed ? duration(request.firstTokenUs) : "";
    return [jump, count(request.prompt), count(request.sampled), wait, request.preempted || "",
      `${steps[request.first].n}–${steps[request.last].n}`];
  });
  byId("requests").append(table(
    [["request"], ["prompt", "num"], ["sampled", "num"], ["first token after", "num"], ["preempted", "num"], ["steps", "num"]], rows));
}

function showDetail(index) {
  const step = steps[index], panel = byId("detail");
  if (!step) return panel.replaceChildren(element("p", {}, "There are no steps."));
  const facts = [`${count(step.wanted)} tokens of ${step.p.length} requests`];
  if (step.mode) facts.push(`${step.mode} (${step.why}), run as ${count(step.ran)} tokens`);
  facts.push(`${count(step.blocks)} of ${count(data.numKvBlocks)} KV blocks`);
  if (data.isTimed) facts.unshift(duration(step.t[1] - step.t[0]));
  if (step.finished) facts.push(`finished: ${step.finished.join(", ")}`);
  if (step.preempted) facts.push(`preempted: ${step.preempted.join(", ")}`);
  if (step.undone) facts.push("rolled back");
  const title = element("h2", {}, `Step ${step.n}`, element("span", { class: "hint" }, `  ${index + 1} of ${steps.length}`));
  const children = [title, element("p", { class: "lead" }, facts.join(" · "))];
  if (step.failed) children.push(element("p", { class: "failed" }, `Failed in ${step.failed}`));
  const longest = Math.max(...step.s.map((stage) => stage[2]), 1);
  const stages = element("div", {}, ...step.s.map(([stage, , us]) =>
    meter(data.stages[stage].name, us / longest, duration(us), colours[stage])));
  const rows = step.p.map(([request, tokens, computed, isDecode, sampled]) => {
    const id = data.requests[request].id, error = step.errors && step.errors[id];
    const got = error ? element("span", { class: "failed" }, error) : ids(sampled);
    return [id, isDecode ? "decode" : "prompt", count(computed), count(tokens), got];
  });
  const batch = element("div", { class: "scroll tall" }, table(
    [["request"], ["kind"], ["computed before", "num"], ["scheduled", "num"], ["sampled token ids", "ids"]], rows));
  const body = step.p.length ? batch : element("p", {}, "Nothing was scheduled.");
  children.push(step.s.length ? element("div", { class: "split" }, stages, body) : body);
  panel.replaceChildren(...children);
}

class BatchChart {
  constructor(canvas, select) {
    this.canvas = canvas;
    this.selected = 0;
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      select(Math.floor((event.clientX - box.left - 44) / ((box.width - 52) / Math.max(steps.length, 1))));
    });
  }
  draw(selected = this.selected) {
    this.selected = selected;
    const { pen, width, height } = canvasOf(this.canvas), paint = palette();
    const left = 44, bottom = height - 20, top = 10, slot = (width - left - 8) / Math.max(steps.length, 1);
    const most = Math.max(...steps.map((step) => step.ran), 1), y = (tokens) => bottom - tokens / most * (bottom - top);
    pen.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const at = Math.round(y(most * share)) + 0.5;
      pen.strokeStyle = paint.line;
      pen.beginPath();
      pen.moveTo(left, at);
      pen.lineTo(width, at);
      pen.stroke();
      pen.fillStyle = paint.soft;
      pen.fillText(count(Math.round(most * share)), left - 6, at);
    }
    const gap = slot > 5 ? 1 : 0, wide = Math.max(slot - gap, 0.8);
    steps.forEach((step, index) => {
      const x = left + index * slot;
      const prefill = step.p.reduce((sum, part) => sum + (part[3] ? 0 : part[1]), 0);
      if (index === selected) { pen.fillStyle = paint.mark; pen.fillRect(x - 1, top - 6, Math.max(slot, 3) + 1, bottom - top + 6); }
      pen.fillStyle = paint.decode; pen.fillRect(x, y(step.wanted - prefill), wide, bottom - y(step.wanted - prefill));
      pen.fillStyle = paint.prefill; pen.fillRect(x, y(step.wanted), wide, y(step.wanted - prefill) - y(step.wanted));
      pen.fillStyle = paint.padding; pen.fillRect(x, y(step.ran), wide, y(step.wanted) - y(step.ran));
      if (step.failed) { pen.fillStyle = paint.warn; pen.fillRect(x, bottom, wide, 4); }
    });
    if (data.numKvBlocks) {
      pen.strokeStyle = paint.c1;
      pen.lineWidth = 2;
      pen.beginPath();
      steps.forEach((step, index) => pen.lineTo(left + (index + 0.5) * slot, bottom - step.blocks / data.numKvBlocks * (bottom - top)));
      pen.stroke();
      pen.lineWidth = 1;
    }
    pen.fillStyle = paint.soft;
    pen.textAlign = "left";
    const each = Math.max(1, Math.ceil(steps.length / Math.max(1, Math.floor((width - left) / 70))));
    for (let index = 0; index < steps.length; index += each) pen.fillText(`${steps[index].n}`, left + index * slot, height - 8);
  }
}
