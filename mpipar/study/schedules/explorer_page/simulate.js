// How long an order takes, as in study/schedules/simulate.py with the costs f, i, w and hop. A
// worker runs its passes one after the other, each as soon as its data have arrived. A browser test
// keeps the times equal to Python's.

/** f, i, w: the cost of a pass by stage. overlap: the cost of OVERLAP_F_B divided by that of its
    parts. hop: from the end of a pass to the start of the pass on another worker that needs it. */
function duration(costs, pass) {
  const each = pass.parts.map(({ kind, stage }) =>
    kind === "B" ? costs.i[stage] + costs.w[stage] : costs[kind.toLowerCase()][stage]);
  return each.length > 1 ? (each[0] + each[1]) * costs.overlap : each[0];
}

/** The timeline of a schedule. A pass that would wait forever runs without its data and is marked
    as forced; a proved schedule has none. */
function simulate(schedule, costs) {
  const spans = schedule.programs.map(() => []), clock = schedule.programs.map(() => 0);
  const flying = new Map(), messages = [], waiting = new Map(), forced = new Set();
  const runnable = schedule.programs.map((_, rank) => rank);
  const run = rank => {
    const program = schedule.programs[rank];
    for (let pass; (pass = program[spans[rank].length]);) {
      const [received, sent] = schedule.onWire(pass);
      const missing = received.find(({ key }) => !flying.has(key));
      if (missing && !forced.has(pass)) { waiting.set(missing.key, rank); return; }
      const span = { pass, rank, start: clock[rank], before: spans[rank].at(-1) ?? null,
                     message: null, forced: forced.has(pass) };
      for (const message of received.map(({ key }) => flying.get(key)).filter(Boolean)) {
        message.to = span;
        messages.push(message);
        if (message.arrives > span.start)
          Object.assign(span, { start: message.arrives, message });
      }
      span.end = clock[rank] = span.start + duration(costs, pass);
      spans[rank].push(span);
      for (const { key } of sent) {
        flying.set(key, { from: span, to: null, arrives: span.end + costs.hop });
        if (waiting.has(key)) runnable.push(waiting.get(key));
        waiting.delete(key);
      }
    }
  };
  while (runnable.length || waiting.size) {
    if (!runnable.length) {  // no worker can proceed: force the earliest one
      const [key, rank] = [...waiting].reduce((a, b) => clock[b[1]] < clock[a[1]] ? b : a);
      forced.add(schedule.programs[rank][spans[rank].length]);
      waiting.delete(key);
      runnable.push(rank);
    }
    run(runnable.shift());
  }
  return figures(schedule, spans, messages);
}

/** The figures of a timeline: step, idle time, stash, messages, and the critical path. */
function figures(schedule, spans, messages) {
  const makespan = Math.max(...spans.map(own => own.at(-1)?.end ?? 0));
  const busy = spans.map(own => own.reduce((sum, { start, end }) => sum + end - start, 0));
  const total = busy.reduce((a, b) => a + b, 0);
  const sent = schedule.programs.map(program =>
    program.reduce((sum, pass) => sum + schedule.onWire(pass)[1].length, 0));
  return { schedule, spans, messages, makespan, busy, sent,
           idle: busy.map(one => makespan - one),
           bubbleShare: 1 - total / (schedule.p * makespan),
           peakStash: schedule.programs.map(peakStash) };
}

/** The chain of passes that determines when the step ends: from its last pass back, each time to
    what the pass waited for, a message or the previous pass on its worker. */
function criticalPath({ spans, makespan }) {
  const path = [];
  let span = spans.map(own => own.at(-1)).find(last => last && last.end === makespan);
  while (span) {
    path.unshift(span);
    span = span.message ? span.message.from : span.before;
  }
  return path;
}
