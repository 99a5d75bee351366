// The timeline: ranks x time on a canvas. Lanes of a rank, from above: compute spans; operations of
// layers, where these were timed; waiting and transfer of its barriers, with a strip in the colour
// of the axis. What follows the pointer is drawn on a second canvas, so that a hover never draws
// the trace again.
const SPAN = { start: 0, length: 1, kind: 2, stage: 3, mb: 4, step: 5 };
const OPERATION = { start: 0, length: 1, phase: 2, stage: 3, mb: 4, step: 5, layer: 6,
                    function: 7 };
const CALL = { start: 0, wait: 1, transfer: 2, name: 3, axis: 4, collective: 5, bytes: 6, sent: 7,
               source: 8, late: 9, stage: 10, mb: 11, step: 12, event: 13, phase: 14,
               cause: 15 };
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

/** Microseconds of a row of a lane. */
function lasting(row, lane) {
  return row[1] + (lane === "calls" ? row[CALL.transfer] : 0);
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
    this.hit = null;
    const steps = data.steps;
    this.limits = [steps[0][1], steps[steps.length - 1][2]];
    this.view = [...this.limits];
    this.lanes = ["spans", "operations", "calls"].filter(
      lane => lane === "spans" || data.ranks.some(rank => rank[lane].length));
    // The longest row of each lane: where to begin the search for what is visible.
    this.longest = data.ranks.map(rank => Object.fromEntries(this.lanes.map(lane =>
      [lane, rank[lane].reduce((most, row) => Math.max(most, lasting(row, lane)), 0)])));
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
    const [least, most] = [[20, 36], [26, 64], [38, 92]][this.lanes.length - 1];
    this.row = Math.max(least, Math.min(most, Math.floor(8 * most / count)));
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
    for (const name of [...this.data.kinds, ...this.data.phases, "wait", "transfer", "card", "row",
                        "ink", "soft", "line", "accent", "on-bar",
                        ...this.data.axes.map(axis => `axis-${axis}`)])
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

  /** Top and height of a rank's lane. */
  lane(rank, which) {
    const height = (this.row - 8) / this.lanes.length;
    const place = this.lanes.indexOf(which), top = Math.round(place * height);
    return [RULER + rank * this.row + 4 + top, Math.round((place + 1) * height) - top - 2];
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
    return !this.hidden.has(this.data.axes[call[CALL.axis]]);
  }

  draw() {
    const c = this.base.getContext("2d");
    c.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    c.fillStyle = this.colours.card;
    c.fillRect(0, 0, this.width, this.height);
    c.fillStyle = this.colours.row;
    for (let r = 0; r < this.data.ranks.length; r += 2)
      c.fillRect(GUTTER, RULER + r * this.row, this.width - GUTTER, this.row);
    this.drawRuler(c);
    this.data.ranks.forEach((rank, r) => {
      const top = RULER + r * this.row;
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
      for (const lane of this.lanes)
        if (lane === "calls") this.drawCalls(c, r); else this.drawWork(c, lane, r);
      c.restore();
    });
    this.drawOver();
  }

  drawRuler(c) {
    const most = Math.max(3, Math.min(9, Math.floor(this.plotWidth() / 64)));  // labels with room
    c.font = "11px system-ui, sans-serif";
    let free = 0;
    for (const time of ticks(...this.view, most)) {
      const x = Math.round(this.x(time)) + 0.5;
      c.fillStyle = this.colours.line;
      c.fillRect(x, RULER - 6, 1, this.height - RULER + 6);
      c.fillStyle = this.colours.soft;
      const label = `${+(time / 1e3).toPrecision(12)} ms`;
      const right = x + 6 + c.measureText(label).width;
      if (x < free || right > this.width) continue;
      c.fillText(label, x + 4, RULER - 9);
      free = right;
    }
    c.fillStyle = this.colours.accent;
    for (const [number, start, end] of this.data.steps) {
      const x = this.x(start);
      if (x < GUTTER || x > this.width) continue;
      c.fillRect(x, RULER - 6, 1.5, this.height - RULER + 6);
      if (this.x(end) - x > 90) c.fillText(`step ${number}`, x + 4, this.height - 5);
    }
  }

  /** Rows of a lane between two times: [first, last). */
  between(rank, lane, start, end) {
    const rows = this.data.ranks[rank][lane];
    return [lowerBound(rows, start - this.longest[rank][lane]), lowerBound(rows, end)];
  }

  /** What a span or an operation is, as the style sheet names its colour. */
  kind(row, lane) {
    return lane === "spans" ? this.data.kinds[row[SPAN.kind]]
      : this.data.phases[row[OPERATION.phase]];
  }

  /** Spans or operations of a rank. */
  drawWork(c, lane, rank) {
    const [top, height] = this.lane(rank, lane), rows = this.data.ranks[rank][lane];
    const [first, last] = this.between(rank, lane, ...this.view);
    c.font = `${lane === "spans" ? 600 : 400} 11px system-ui, sans-serif`;
    let drawn = -1, kindDrawn = "";
    for (let i = first; i < last; i++) {
      const row = rows[i], x = this.x(row[0]), width = this.x(row[0] + row[1]) - x;
      const kind = this.kind(row, lane);
      // Many slices in one pixel are one pixel.
      if (x + width < drawn + 0.5 && kindDrawn === kind) continue;
      c.fillStyle = this.colours[kind];
      c.fillRect(x, top, Math.max(width - (width > 4 ? 0.75 : 0), 0.8), height);
      drawn = x + Math.max(width, 0.8);
      kindDrawn = kind;
      if (width > 18) {
        const labels = lane === "operations" ? this.operationLabels(row)
          : [row[SPAN.mb] >= 0 && kind !== "data" ? `${kind}${row[SPAN.mb]}` : kind];
        this.label(c, labels, x, x + width, top, height);
      }
    }
    c.globalAlpha = 1;
  }

  /** An operation's labels for more and for less room; some belong to no layer. */
  operationLabels(row) {
    const name = this.data.functions[row[OPERATION.function]];
    return [`${this.data.layers[row[OPERATION.layer]]} ${name}`.trim(), name];
  }

  drawCalls(c, rank) {
    const [top, height] = this.lane(rank, "calls"), calls = this.data.ranks[rank].calls;
    const [first, last] = this.between(rank, "calls", ...this.view);
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
      if (end - x > 30) this.label(c, [this.data.names[call[CALL.name]]], x, end, top, height - 4);
    }
  }

  /** The first of the texts that the visible part of a slice has room for. */
  label(c, texts, left, right, top, height) {
    left = Math.max(left, GUTTER);
    right = Math.min(right, this.width - 8);
    if (height < 10) return;
    const text = texts.find(one => c.measureText(one).width <= right - left - 4) ?? "";
    c.fillStyle = this.colours["on-bar"];
    c.fillText(text, left + 2, top + height / 2 + 4);
  }
}
