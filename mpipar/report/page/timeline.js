// The timeline: ranks x time on a canvas. Upper lane of a rank: compute spans; lower lane: waiting
// and transfer of its barriers, with a strip in the colour of the axis. What follows the pointer is
// drawn on a second canvas, so that a hover never draws the trace again.
const SPAN = { start: 0, length: 1, kind: 2, stage: 3, mb: 4, step: 5 };
const CALL = { start: 0, wait: 1, transfer: 2, name: 3, axis: 4, operation: 5, bytes: 6, sent: 7,
               site: 8, late: 9, stage: 10, mb: 11, step: 12, event: 13, phase: 14 };
const GUTTER = 118, RULER = 24, FOOT = 18;

/** Index of the first row whose start is not below `time`. Rows are sorted by start. */
function lowerBound(rows, time) {
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] < time) low = middle + 1; else high = middle;
  }
  return low;
}

/** A colour of the style sheet as the canvas needs it, in the theme that is shown now. */
function colour(name) {
  const probe = colour.probe ??= document.body.appendChild(document.createElement("i"));
  probe.style.display = "none";
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

function milliseconds(us) {
  return us >= 1e5 ? `${(us / 1e3).toFixed(0)} ms` : us >= 1e3 ? `${(us / 1e3).toFixed(2)} ms`
    : `${us.toFixed(1)} us`;
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return `${unit === "B" ? count.toFixed(0) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}

class Timeline {
  constructor(data, places) {
    this.data = data;
    this.places = places;
    this.base = document.getElementById("base");
    this.over = document.getElementById("over");
    this.tip = document.getElementById("tip");
    this.hidden = new Set();          // axes that are filtered out
    this.focus = null;                // {axis, family, operation} of the barrier that is looked at
    this.hit = null;
    const steps = data.steps;
    this.limits = [steps[0][1], steps[steps.length - 1][2]];
    this.view = [...this.limits];
    // Long calls before short ones: where to begin the search for what is visible.
    this.longest = data.ranks.map(rank => Math.max(
      rank.spans.reduce((most, row) => Math.max(most, row[SPAN.length]), 0),
      rank.calls.reduce((most, row) => Math.max(most, row[CALL.wait] + row[CALL.transfer]), 0)));
    this.events = new Map();          // event -> [[rank, call], ...]
    data.ranks.forEach((rank, r) => rank.calls.forEach(call => {
      if (call[CALL.event] < 0) return;
      if (!this.events.has(call[CALL.event])) this.events.set(call[CALL.event], []);
      this.events.get(call[CALL.event]).push([r, call]);
    }));
    this.listen();
    new ResizeObserver(() => this.resize()).observe(document.getElementById("plot"));
    this.resize();
  }

  resize() {
    const count = this.data.ranks.length;
    this.row = Math.max(26, Math.min(64, Math.floor(520 / count)));
    this.width = document.getElementById("plot").clientWidth;
    this.height = RULER + this.row * count + FOOT;
    const scale = this.scale = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) {
      canvas.width = this.width * scale;
      canvas.height = this.height * scale;
      canvas.style.width = `${this.width}px`;
      canvas.style.height = `${this.height}px`;
    }
    this.recolour();
  }

  /** Take the theme's colours again, and draw. */
  recolour() {
    this.colours = {};
    for (const name of [...this.data.kinds, "wait", "transfer", "card", "row", "ink", "soft",
                        "line", "accent", "on-bar", ...this.data.axes.map(axis => `axis-${axis}`)])
      this.colours[name] = colour(name) || colour("soft");
    this.draw();
  }

  x(time) {
    return GUTTER + (time - this.view[0]) / (this.view[1] - this.view[0]) * this.plotWidth();
  }

  time(x) {
    return this.view[0] + (x - GUTTER) / this.plotWidth() * (this.view[1] - this.view[0]);
  }

  plotWidth() { return this.width - GUTTER - 8; }

  /** Top and height of a rank's lane: "compute" or "barriers". */
  lane(rank, which) {
    const inner = this.row - 8, upper = Math.round(inner * 0.5);
    const top = RULER + rank * this.row + 4;
    return which === "compute" ? [top, upper] : [top + upper + 2, inner - upper - 2];
  }

  /** Show [start, end], inside the trace and at least a microsecond long. */
  show(start, end) {
    const [low, high] = this.limits;
    const length = Math.min(Math.max(end - start, 1), high - low);
    start = Math.min(Math.max(start, low), high - length);
    this.view = [start, start + length];
    this.draw();
  }

  shown(call) {
    if (this.hidden.has(this.data.axes[call[CALL.axis]])) return false;
    if (!this.focus) return true;
    return this.data.axes[call[CALL.axis]] === this.focus.axis
      && this.data.operations[call[CALL.operation]] === this.focus.operation
      && this.data.names[call[CALL.name]].replace(/\d+/g, "*") === this.focus.name;
  }

  draw() {
    const c = this.base.getContext("2d");
    c.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    c.fillStyle = this.colours.card;
    c.fillRect(0, 0, this.width, this.height);
    this.drawRuler(c);
    this.data.ranks.forEach((rank, r) => {
      const top = RULER + r * this.row;
      if (r % 2 === 0) {
        c.fillStyle = this.colours.row;
        c.fillRect(GUTTER, top, this.width - GUTTER, this.row);
      }
      c.fillStyle = this.colours.ink;
      c.font = "600 12px system-ui, sans-serif";
      c.fillText(`rank ${r}`, 12, top + this.row / 2 - (this.row > 34 ? 2 : -4));
      if (this.row > 34) {
        c.fillStyle = this.colours.soft;
        c.font = "11px system-ui, sans-serif";
        c.fillText(this.places[r], 12, top + this.row / 2 + 13);
      }
      c.save();
      c.beginPath();
      c.rect(GUTTER, top, this.plotWidth(), this.row);
      c.clip();
      this.drawSpans(c, rank.spans, r);
      this.drawCalls(c, rank.calls, r);
      c.restore();
    });
    this.drawOver();
  }

  drawRuler(c) {
    const length = this.view[1] - this.view[0];
    let step = 10 ** Math.floor(Math.log10(length / 6));
    step *= [1, 2, 5, 10].find(factor => length / (step * factor) <= 9);
    c.font = "11px system-ui, sans-serif";
    for (let time = Math.ceil(this.view[0] / step) * step; time <= this.view[1]; time += step) {
      const x = Math.round(this.x(time)) + 0.5;
      c.fillStyle = this.colours.line;
      c.fillRect(x, RULER - 6, 1, this.height - RULER + 6);
      c.fillStyle = this.colours.soft;
      const label = `${+(time / 1e3).toPrecision(12)} ms`;
      if (x + 6 + c.measureText(label).width < this.width) c.fillText(label, x + 4, RULER - 9);
    }
    c.fillStyle = this.colours.accent;
    for (const [number, start, end] of this.data.steps) {
      const x = this.x(start);
      if (x < GUTTER || x > this.width) continue;
      c.fillRect(x, RULER - 6, 1.5, this.height - RULER + 6);
      if (this.x(end) - x > 90) c.fillText(`step ${number}`, x + 4, this.height - 5);
    }
  }

  /** Rows of a rank that may be visible: [first, last). */
  visible(rows, rank) {
    return [lowerBound(rows, this.view[0] - this.longest[rank]), lowerBound(rows, this.view[1])];
  }

  drawSpans(c, spans, rank) {
    const [top, height] = this.lane(rank, "compute"), [first, last] = this.visible(spans, rank);
    c.font = "600 11px system-ui, sans-serif";
    c.globalAlpha = this.focus ? 0.35 : 1;
    let drawn = -1, kindDrawn = -1;
    for (let i = first; i < last; i++) {
      const span = spans[i], x = this.x(span[0]), width = this.x(span[0] + span[1]) - x;
      // Many slices in one pixel are one pixel.
      if (x + width < drawn + 0.5 && kindDrawn === span[SPAN.kind]) continue;
      const kind = this.data.kinds[span[SPAN.kind]];
      c.fillStyle = this.colours[kind];
      c.fillRect(x, top, Math.max(width - (width > 4 ? 0.75 : 0), 0.8), height);
      drawn = x + Math.max(width, 0.8);
      kindDrawn = span[SPAN.kind];
      if (width > 18) {
        const label = span[SPAN.mb] >= 0 && kind !== "data" ? `${kind}${span[SPAN.mb]}` : kind;
        this.label(c, label, x, x + width, top, height);
      }
    }
    c.globalAlpha = 1;
  }

  drawCalls(c, calls, rank) {
    const [top, height] = this.lane(rank, "barriers"), [first, last] = this.visible(calls, rank);
    c.font = "11px system-ui, sans-serif";
    let drawn = -1;
    for (let i = first; i < last; i++) {
      const call = calls[i];
      if (!this.shown(call)) continue;
      const x = this.x(call[CALL.start]), split = this.x(call[CALL.start] + call[CALL.wait]);
      const end = this.x(call[CALL.start] + call[CALL.wait] + call[CALL.transfer]);
      if (end < drawn + 0.5) continue;
      if (split > x) {
        c.fillStyle = this.colours.wait;
        c.fillRect(x, top, Math.max(split - x, 0.8), height - 4);
      }
      if (end > split) {
        c.fillStyle = this.colours.transfer;
        c.fillRect(split, top, Math.max(end - split, 0.8), height - 4);
      }
      c.fillStyle = this.colours[`axis-${this.data.axes[call[CALL.axis]]}`];
      c.fillRect(x, top + height - 4, Math.max(end - x, 0.8), 3);
      drawn = Math.max(end, x + 0.8);
      if (end - x > 30) this.label(c, this.data.names[call[CALL.name]], x, end, top, height - 4);
    }
  }

  /** Text inside a slice, if the part of the slice that is visible has room for it. */
  label(c, text, left, right, top, height) {
    left = Math.max(left, GUTTER);
    right = Math.min(right, this.width - 8);
    if (height < 10 || c.measureText(text).width > right - left - 7) return;
    c.fillStyle = this.colours["on-bar"];
    c.fillText(text, left + 4, top + height / 2 + 4);
  }
}
