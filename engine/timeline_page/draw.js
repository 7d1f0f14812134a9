// What the charts share: colours from the style sheet, sharp canvases, figures as text.
const data = JSON.parse(document.getElementById("data").textContent);
const steps = data.steps;
const byId = (id) => document.getElementById(id);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const palette = () => {
  const names = ["card", "ink", "soft", "line", "faint", "accent", "warn", "mark", "prefill", "decode", "padding",
    "idle", "forwarded", "sampled", "on-state", ...Array.from({ length: 10 }, (_, i) => `c${i}`)];
  return Object.fromEntries(names.map((name) => [name, colour(name)]));
};
// The forward pass has one colour in every recording, the others follow in order.
const stageColour = (index) => {
  const name = data.stages[index].name;
  if (name === "forward") return "c0";
  const others = data.stages.map((stage) => stage.name).filter((other) => other !== "forward");
  return `c${1 + (others.indexOf(name) % 9)}`;
};
const colours = data.stages.map((_, index) => stageColour(index));

function canvasOf(canvas, height) {
  const width = canvas.clientWidth, ratio = Math.max(window.devicePixelRatio || 1, 1);
  if (height) canvas.style.height = `${height}px`;
  const tall = height || canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, tall);
  pen.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  return { pen, width, height: tall };
}

function fitted(pen, text, width) {
  if (width < 14) return "";
  if (pen.measureText(text).width <= width) return text;
  let cut = text.slice(0, Math.max(1, Math.floor(text.length * width / pen.measureText(text).width)));
  while (cut.length > 1 && pen.measureText(cut + "…").width > width) cut = cut.slice(0, -1);
  return cut.length > 3 ? cut + "…" : "";
}

function duration(us) {
  if (!data.isTimed) return `${Math.round(us / 1000)} steps`;
  if (us >= 1e6) return `${(us / 1e6).toFixed(2)} s`;
  if (us >= 1e3) return `${(us / 1e3).toFixed(us >= 1e5 ? 0 : 2)} ms`;
  return `${Math.round(us)} µs`;
}
const percent = (share) => `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
const count = (value) => value.toLocaleString("en");
const ids = (tokens) => tokens.length && tokens[0] < 0 ? `${tokens.length} redacted` : tokens.join(" ");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value); else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function table(columns, rows) {
  const head = element("tr", {}, ...columns.map(([name, kind]) => element("th", { scope: "col", class: kind || "" }, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, index) => {
    const kind = columns[index][1] || "";
    return element("td", { class: kind }, cell instanceof Node ? cell : String(cell));
  })));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}
