// What the pointer and the keyboard do with the timeline: zoom, move, and say what lies below.
Object.assign(Timeline.prototype, {
  listen() {
    let drag = null;
    this.base.addEventListener("wheel", event => {
      const [start, end] = this.view, [low, high] = this.limits;
      if (event.deltaY > 0 && end - start >= high - low) return;  // then it scrolls the page
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
      }[event.key === "=" ? "+" : event.key];
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
    const row = hit && (hit.call || hit.span);
    if (row !== (this.hit && (this.hit.call || this.hit.span))) {
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

  /** The span or call at a point of the canvas, within two pixels of it, or null. */
  find(x, y) {
    const rank = Math.floor((y - RULER) / this.row);
    if (x < GUTTER || rank < 0 || rank >= this.data.ranks.length) return null;
    const isCompute = y < this.lane(rank, "barriers")[0];
    const rows = this.data.ranks[rank][isCompute ? "spans" : "calls"];
    const slack = 2 * (this.view[1] - this.view[0]) / this.plotWidth(), time = this.time(x);
    const last = lowerBound(rows, time + slack);
    const first = lowerBound(rows, time - slack - this.longest[rank]);
    let best = null, nearest = slack;
    for (let i = last - 1; i >= first; i--) {
      const row = rows[i];
      if (!isCompute && !this.shown(row)) continue;
      const end = row[0] + row[1] + (isCompute ? 0 : row[CALL.transfer]);
      const distance = Math.max(row[0] - time, time - end, 0);
      if (distance < nearest || (distance === 0 && !best)) {
        best = row;
        nearest = distance;
        if (!distance) break;
      }
    }
    return best && (isCompute ? { rank, span: best } : { rank, call: best });
  },

  describe({ rank, span, call }) {
    const d = this.data, lines = [];
    let title, dot;
    if (span) {
      const kind = d.kinds[span[SPAN.kind]];
      title = `${WORDS[kind]}${span[SPAN.stage] >= 0 && kind.length === 1
        ? ` of stage ${span[SPAN.stage]}` : ""}`;
      dot = kind;
      lines.push(["rank", `${rank}, ${this.places[rank]}`],
        ["step", `${span[SPAN.step]}${span[SPAN.mb] >= 0 ? `, microbatch ${span[SPAN.mb]}` : ""}`],
        ["lasts", milliseconds(span[SPAN.length])]);
    } else {
      const axis = d.axes[call[CALL.axis]], late = call[CALL.late];
      title = d.names[call[CALL.name]];
      dot = `axis-${axis}`;
      const members = (this.events.get(call[CALL.event]) || []).map(([r]) => r);
      const place = call[CALL.mb] >= 0
        ? `, phase ${call[CALL.phase]}, stage ${call[CALL.stage]}, microbatch ${call[CALL.mb]}`
        : `, phase ${call[CALL.phase]}`;
      lines.push(["axis", `${axis}, ${d.operations[call[CALL.operation]]}`],
        ["rank", `${rank}${members.length > 1 ? ` with ${members.filter(r => r !== rank)
          .join(", ")}` : ""}`],
        ["step", `${call[CALL.step]}${place}`],
        ["bytes", `${bytes(call[CALL.bytes])} (sends ${bytes(call[CALL.sent])})`],
        ["wait", milliseconds(call[CALL.wait]) + (late >= 0 ? ` for rank ${late}` : "")],
        ["transfer", milliseconds(call[CALL.transfer])],
        ["source", d.sites[call[CALL.site]]]);
    }
    const heading = document.createElement("h3"), list = document.createElement("dl");
    heading.append(swatch(dot), ` ${title}`);
    for (const [name, text] of lines) {
      list.append(Object.assign(document.createElement("dt"), { textContent: name }),
                  Object.assign(document.createElement("dd"), { textContent: text }));
    }
    this.tip.replaceChildren(heading, list);
  },

  /** Outline what the pointer is on: a barrier on all its ranks, and arrows from the late one. */
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
    const { rank, span, call } = this.hit;
    const outline = (r, which, start, length) => {
      const [top, height] = this.lane(r, which), x = this.x(start);
      c.strokeRect(x, top, Math.max(this.x(start + length) - x, 1), height);
    };
    if (span) return outline(rank, "compute", span[0], span[1]);
    const members = this.events.get(call[CALL.event]) || [[rank, call]];
    for (const [r, one] of members)
      outline(r, "barriers", one[CALL.start], one[CALL.wait] + one[CALL.transfer]);
    for (const [r, one] of members) {
      if (one[CALL.late] < 0) continue;
      const x = this.x(one[CALL.start] + one[CALL.wait]);
      const middle = lane => this.lane(lane, "barriers")[0] + this.lane(lane, "barriers")[1] / 2;
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
