// Pointer and keyboard on the timeline: zoom, move, and describe what is under the pointer.
const KEYS = { "=": "+", w: "+", s: "-", a: "ArrowLeft", d: "ArrowRight" };  // as in other viewers

Object.assign(Timeline.prototype, {
  listen() {
    let drag = null;
    this.base.addEventListener("wheel", event => {
      const [start, end] = this.view, [low, high] = this.limits;
      if (event.deltaY > 0 && end - start >= high - low) return;  // scroll the page instead
      event.preventDefault();
      const at = this.time(Math.max(GUTTER, event.offsetX));
      const factor = Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0015));
      this.show(at - (at - this.view[0]) * factor, at + (this.view[1] - at) * factor);
      this.hover(event);
    }, { passive: false });
    this.base.addEventListener("pointerdown", event => {
      drag = { x: event.offsetX, view: [...this.view] };
      this.base.setPointerCapture(event.pointerId);
    });
    this.base.addEventListener("pointerup", () => { drag = null; });
    this.base.addEventListener("pointermove", event => {
      if (!drag) return this.hover(event);
      const moved = (drag.x - event.offsetX) / this.plotWidth() * (drag.view[1] - drag.view[0]);
      this.show(drag.view[0] + moved, drag.view[1] + moved);
      this.leave();
    });
    this.base.addEventListener("pointerleave", () => this.leave());
    this.base.addEventListener("dblclick", () => this.show(...this.limits));
    this.base.addEventListener("keydown", event => {
      const [start, end] = this.view, length = end - start;
      const view = {
        "+": [start + length / 4, end - length / 4], "-": [start - length / 2, end + length / 2],
        ArrowLeft: [start - length / 5, end - length / 5],
        ArrowRight: [start + length / 5, end + length / 5], "0": this.limits,
      }[KEYS[event.key] ?? event.key];
      if (view) { event.preventDefault(); this.show(...view); }
    });
  },

  leave() {
    this.hit = null;
    this.tip.hidden = true;
    this.drawOver();
  },

  hover(event) {
    const hit = this.find(event.offsetX, event.offsetY);
    if (hit?.row !== this.hit?.row) {
      this.hit = hit;
      this.drawOver();
      if (hit) this.describe(hit);
    }
    this.tip.hidden = !hit;
    if (!hit) return;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width
      : event.clientX + 16;
    const top = Math.min(event.clientY + 16, innerHeight - height - 8);
    this.tip.style.left = `${Math.max(8, left)}px`;
    this.tip.style.top = `${Math.max(8, top)}px`;
  },

  /** What is drawn at a point of the canvas, within two pixels of it: {rank, lane, row} or null. */
  find(x, y) {
    const rank = Math.floor((y - RULER) / this.row);
    if (x < GUTTER || rank < 0 || rank >= this.data.ranks.length) return null;
    const lane = this.lanes.findLast(one => y >= this.lane(rank, one)[0]) ?? "spans";
    const rows = this.data.ranks[rank][lane];
    const slack = 2 * (this.view[1] - this.view[0]) / this.plotWidth(), time = this.time(x);
    const [first, last] = this.between(rank, lane, time - slack, time + slack);
    let best = null, nearest = slack;
    for (let i = last - 1; i >= first; i--) {
      const row = rows[i];
      if (lane === "calls" && !this.shown(row)) continue;
      const distance = Math.max(row[0] - time, time - row[0] - lasting(row, lane), 0);
      if (distance < nearest || (distance === 0 && !best)) {
        best = row;
        nearest = distance;
        if (!distance) break;
      }
    }
    return best && { rank, lane, row: best };
  },

  describe({ rank, lane, row }) {
    const [dot, title, lines] = { spans: this.aboutSpan, operations: this.aboutOperation,
                                  calls: this.aboutCall }[lane].call(this, row, rank);
    const heading = element("h3", ` ${title}`), list = element("dl");
    heading.prepend(swatch(dot));
    for (const [name, text] of lines) list.append(element("dt", name), element("dd", text));
    this.tip.replaceChildren(heading, list);
  },

  /** [colour, title, lines] of a tooltip. */
  aboutSpan(span, rank) {
    const kind = this.kind(span, "spans"), mb = span[SPAN.mb];
    const stage = span[SPAN.stage] >= 0 && kind.length === 1 ? ` of stage ${span[SPAN.stage]}` : "";
    return [kind, WORDS[kind] + stage, [["rank", `${rank}, ${this.places[rank]}`],
      ["step", `${span[SPAN.step]}${mb >= 0 ? `, microbatch ${mb}` : ""}`],
      ["duration", milliseconds(span[SPAN.length])]]];
  },

  aboutOperation(one, rank) {
    const phase = this.kind(one, "operations"), layer = this.data.layers[one[OPERATION.layer]];
    const place = one[OPERATION.mb] >= 0
      ? `, stage ${one[OPERATION.stage]}, microbatch ${one[OPERATION.mb]}` : "";
    return [phase, this.data.functions[one[OPERATION.function]], [["layer", layer || "none"],
      ["rank", `${rank}, ${this.places[rank]}`],
      ["step", `${one[OPERATION.step]}, ${WORDS[phase] ?? phase}${place}`],
      ["duration", milliseconds(one[OPERATION.length])]]];
  },

  aboutCall(call, rank) {
    const d = this.data, axis = d.axes[call[CALL.axis]], late = call[CALL.late];
    const members = (this.events.get(call[CALL.event]) || []).map(([r]) => r);
    const others = members.filter(r => r !== rank).join(", ");
    const place = call[CALL.mb] >= 0 ? `, stage ${call[CALL.stage]}, microbatch ${call[CALL.mb]}`
      : "";
    return [`axis-${axis}`, d.names[call[CALL.name]], [
      ["axis", `${axis}, ${d.collectives[call[CALL.collective]]}`],
      ["rank", others ? `${rank} with ${others}` : `${rank}`],
      ["step", `${call[CALL.step]}, phase ${call[CALL.phase]}${place}`],
      ["bytes", `${bytes(call[CALL.bytes])} (sends ${bytes(call[CALL.sent])})`],
      ["wait", milliseconds(call[CALL.wait]) + (late >= 0 ? ` for rank ${late}` : "")],
      ...(late >= 0 ? [["because", d.causes[call[CALL.cause]]]] : []),
      ["transfer", milliseconds(call[CALL.transfer])],
      ["source", d.sources[call[CALL.source]]]]];
  },

  /** Outline what is under the pointer: a barrier on all ranks, and arrows from the late one. */
  drawOver() {
    const c = this.over.getContext("2d");
    c.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    if (!this.hit) return;
    c.beginPath();
    c.rect(GUTTER, RULER, this.plotWidth(), this.height - RULER);
    c.clip();
    c.strokeStyle = c.fillStyle = this.colours.ink;
    c.lineWidth = 1.5;
    const { rank, lane, row } = this.hit;
    const members = lane === "calls" && this.events.get(row[CALL.event]) || [[rank, row]];
    for (const [r, one] of members) {
      const [top, height] = this.lane(r, lane), x = this.x(one[0]);
      c.strokeRect(x, top, Math.max(this.x(one[0] + lasting(one, lane)) - x, 1), height);
    }
    if (lane !== "calls") return;
    for (const [r, one] of members) {
      if (one[CALL.late] < 0) continue;
      const x = this.x(one[CALL.start] + one[CALL.wait]);
      const middle = other => this.lane(other, "calls")[0] + this.lane(other, "calls")[1] / 2;
      this.arrow(c, x, middle(one[CALL.late]), middle(r));
    }
  },

  /** An upright arrow at x, from the rank that came last to the one that waited. */
  arrow(c, x, from, to) {
    const direction = Math.sign(to - from);
    c.beginPath();
    c.moveTo(x, from);
    c.lineTo(x, to - 6 * direction);
    c.stroke();
    c.beginPath();
    c.moveTo(x, to);
    c.lineTo(x - 4, to - 8 * direction);
    c.lineTo(x + 4, to - 8 * direction);
    c.fill();
  },
});
