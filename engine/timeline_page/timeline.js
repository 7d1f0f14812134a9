// The steps in time: machine states, stages and requests as rows, over one time axis that zooms and pans.
class StepTimeline {
  constructor(canvas, tip, onSelect) {
    this.canvas = canvas;
    this.tip = tip;
    this.onSelect = onSelect;
    this.selected = 0;
    this.firstRow = 0;
    this.span = Math.max(data.durationUs, 1);
    this.from = 0;
    this.to = this.span;
    this.left = 112;
    this.rowHeight = 18;
    this.hover = null;
    this.listen();
  }

  get visibleRows() { return Math.min(data.requests.length, 14); }
  get height() { return 22 + 24 + 30 + 10 + this.visibleRows * this.rowHeight + 8; }
  get requestsTop() { return 22 + 24 + 30 + 10; }

  x(us) { return this.left + (us - this.from) / (this.to - this.from) * (this.width - this.left); }
  us(x) { return this.from + (x - this.left) / (this.width - this.left) * (this.to - this.from); }

  show(from, to) {
    const least = Math.min(this.span, 20), length = Math.min(Math.max(to - from, least), this.span);
    const start = Math.min(Math.max(from, 0), this.span - length);
    this.from = start;
    this.to = start + length;
    this.draw();
  }
  // Around the selected step where that is in sight, else around the middle.
  get anchor() {
    const [start, end] = steps.length ? steps[this.selected].t : [0, 0], middle = (start + end) / 2;
    return middle >= this.from && middle <= this.to ? middle : (this.from + this.to) / 2;
  }
  zoom(factor, at = this.anchor) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }
  pan(share) { const by = (this.to - this.from) * share; this.show(this.from + by, this.to + by); }
  fit() { this.show(0, this.span); }

  select(index, { reveal = true } = {}) {
    if (!steps.length) return;
    this.selected = Math.min(Math.max(index, 0), steps.length - 1);
    const [start, end] = steps[this.selected].t;
    if (reveal && (start < this.from || end > this.to)) {
      const half = Math.max((this.to - this.from) / 2, (end - start) * 0.75), middle = (start + end) / 2;
      this.show(middle - half, middle + half);
    }
    if (reveal) this.revealRequests();
    this.draw();
    this.onSelect(this.selected);
  }
  revealRequests() {
    const rows = steps[this.selected].p.map((part) => part[0]);
    if (rows.length && !rows.some((row) => row >= this.firstRow && row < this.firstRow + this.visibleRows)) {
      this.scroll(Math.min(...rows) - this.firstRow);
    }
  }
  scroll(rows) {
    this.firstRow = Math.min(Math.max(this.firstRow + rows, 0), Math.max(data.requests.length - this.visibleRows, 0));
    this.draw();
  }

  // The steps that are at least partly on screen: they are in order of time.
  visible() {
    let low = 0, high = steps.length;
    while (low < high) { const mid = (low + high) >> 1; if (steps[mid].t[1] < this.from) low = mid + 1; else high = mid; }
    let end = low;
    while (end < steps.length && steps[end].t[0] <= this.to) end += 1;
    return [low, end];
  }
  stepAt(us) {
    let low = 0, high = steps.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (steps[mid].t[0] <= us) low = mid; else high = mid - 1; }
    return low;
  }

  draw() {
    const { pen, width, height } = canvasOf(this.canvas, this.height);
    this.width = width;
    const paint = palette();
    this.drawAxis(pen, paint, height);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, width - this.left, height);
    pen.clip();
    this.drawSelection(pen, paint, height);
    this.drawStates(pen, paint);
    this.drawSteps(pen, paint);
    pen.restore();
    this.drawLabels(pen, paint);
    const step = steps[this.selected];
    this.canvas.setAttribute("aria-label", step ? `Timeline of ${steps.length} steps, step ${step.n} selected` : "No steps");
  }
  drawAxis(pen, paint, height) {
    const rough = (this.to - this.from) / Math.max((this.width - this.left) / 110, 1);
    const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-3)));
    const gap = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
    pen.strokeStyle = paint.line;
    pen.fillStyle = paint.soft;
    pen.textAlign = "left";
    for (let at = Math.ceil(this.from / gap) * gap; at <= this.to; at += gap) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 14);
      pen.lineTo(x, height);
      pen.stroke();
      if (x < this.width - 40) pen.fillText(data.isTimed ? duration(at) : `${Math.round(at / 1000)}`, x + 4, 9);
    }
  }
  drawSelection(pen, paint, height) {
    const step = steps[this.selected];
    if (!step) return;
    const x = this.x(step.t[0]), wide = Math.max(this.x(step.t[1]) - x, 2);
    pen.fillStyle = paint.mark;
    pen.fillRect(x - 1, 16, wide + 2, height - 16);
    pen.fillStyle = paint.accent;
    pen.fillRect(x - 1, 16, wide + 2, 2);
  }
  box(pen, fill, from, to, y, tall, text, ink) {
    const x = Math.max(this.x(from), this.left - 2), wide = Math.min(this.x(to), this.width + 2) - x;
    if (wide <= 0) return;
    const gap = wide > 4 ? 0.75 : 0;
    pen.fillStyle = fill;
    pen.fillRect(x + gap / 2, y, Math.max(wide - gap, 0.6), tall);
    if (text && wide > 26) {
      pen.fillStyle = ink;
      pen.textAlign = "left";
      pen.fillText(fitted(pen, text, wide - 8), x + 4, y + tall / 2 + 0.5);
    }
  }
  drawStates(pen, paint) {
    for (const [name, from, to] of data.states) {
      if (to < this.from || from > this.to) continue;
      this.box(pen, paint[name.toLowerCase()] || paint.padding, from, to, 22, 18, name, paint["on-state"]);
    }
  }
  drawSteps(pen, paint) {
    const [low, high] = this.visible(), top = this.requestsTop;
    for (let index = low; index < high; index += 1) {
      const step = steps[index], [start, end] = step.t;
      for (const [stage, from, us] of step.s) {
        this.box(pen, paint[colours[stage]], from, from + us, 46, 24, data.stages[stage].name, paint.card);
      }
      if (!step.s.length) this.box(pen, paint.c9, start, end, 46, 24, `${step.n}`, paint.card);
      if (step.failed) this.box(pen, paint.warn, end - (end - start) * 0.05, end, 44, 28, "", paint.card);
      for (const [request, tokens, , isDecode, sampled] of step.p) {
        const row = request - this.firstRow;
        if (row < 0 || row >= this.visibleRows) continue;
        const y = top + row * this.rowHeight;
        const text = isDecode ? ids(sampled) : `${tokens} prompt tokens`;
        this.box(pen, isDecode ? paint.decode : paint.prefill, start, end, y + 2, this.rowHeight - 4, text, paint.card);
      }
    }
  }
  drawLabels(pen, paint) {
    pen.fillStyle = paint.soft;
    pen.textAlign = "right";
    pen.fillText("machine", this.left - 10, 31);
    pen.fillText("stages", this.left - 10, 58);
    for (let row = 0; row < this.visibleRows; row += 1) {
      const request = data.requests[this.firstRow + row];
      const y = this.requestsTop + row * this.rowHeight + this.rowHeight / 2;
      pen.fillText(fitted(pen, request.id, this.left - 16), this.left - 10, y);
    }
    const hidden = data.requests.length - this.visibleRows;
    if (hidden > 0) {
      const tall = this.visibleRows * this.rowHeight, share = this.visibleRows / data.requests.length;
      pen.fillStyle = paint.faint;
      pen.fillRect(this.left - 6, this.requestsTop, 4, tall);
      pen.fillStyle = paint.soft;
      pen.fillRect(this.left - 6, this.requestsTop + tall * this.firstRow / data.requests.length, 4, Math.max(tall * share, 8));
    }
  }

  // What the pointer is over, as text for the tip.
  textAt(x, y) {
    if (x < this.left || !steps.length) return "";
    const us = this.us(x), step = steps[this.stepAt(us)];
    if (y >= 22 && y < 42) {
      const state = data.states.find(([, from, to]) => us >= from && us < to);
      return state ? `${state[0]} for ${duration(state[2] - state[1])}` : "";
    }
    if (us > step.t[1]) return y < this.requestsTop ? `between steps ${step.n} and ${step.n + 1}` : "";
    if (y >= 44 && y < 74) {
      const stage = step.s.find(([, from, time]) => us >= from && us < from + time);
      return stage ? `step ${step.n}: ${data.stages[stage[0]].name}\n${duration(stage[2])}` : `step ${step.n}, between stages`;
    }
    const row = Math.floor((y - this.requestsTop) / this.rowHeight) + this.firstRow;
    const part = row >= this.firstRow && step.p.find(([request]) => request === row);
    if (!part) return "";
    const got = part[4].length ? `\nsampled ${ids(part[4])}` : "";
    return `${data.requests[row].id}, step ${step.n}\n${part[1]} tokens after ${part[2]} computed${got}`;
  }
  showTip(x, y) {
    const text = this.textAt(x, y);
    this.tip.hidden = !text;
    if (!text) return;
    this.tip.textContent = text;
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.min(x + 14, this.width - wide - 4)}px`;
    this.tip.style.top = `${y + 18}px`;
  }

  listen() {
    const canvas = this.canvas;
    const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [x] = at(event);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / this.width);
      else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), this.us(Math.max(x, this.left)));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, y: event.clientY, from: this.from, to: this.to, row: this.firstRow, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return this.showTip(...at(event));
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (Math.abs(dx) + Math.abs(dy) > 4) drag.moved = true;
      if (!drag.moved) return;
      canvas.classList.add("dragging");
      this.tip.hidden = true;
      const by = -dx / (this.width - this.left) * (drag.to - drag.from);
      this.firstRow = drag.row;
      this.show(drag.from + by, drag.to + by);
      this.scroll(Math.round(-dy / this.rowHeight));
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x] = at(event);
      if (drag && !drag.moved && x >= this.left) this.select(this.stepAt(this.us(x)), { reveal: false });
      drag = null;
      canvas.classList.remove("dragging");
    });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => event.shiftKey ? this.pan(-0.15) : this.select(this.selected - 1),
      ArrowRight: () => event.shiftKey ? this.pan(0.15) : this.select(this.selected + 1),
      ArrowUp: () => this.scroll(-1), ArrowDown: () => this.scroll(1),
      Home: () => this.select(0), End: () => this.select(steps.length - 1),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), "0": () => this.fit(),
      PageUp: () => this.select(this.selected - 10), PageDown: () => this.select(this.selected + 10),
    };
    const action = actions[event.key];
    if (action) { event.preventDefault(); action(); }
  }
}
