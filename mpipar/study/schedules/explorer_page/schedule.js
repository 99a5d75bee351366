// A schedule as data: passes, where they run, and the messages between them. Names and rules are
// those of pipeline/instructions.py.
const PART = /(\d+)([FBIW])(\d+)/g;

/** The pass of a cell such as 2F0 or (0F1;1B0)OVERLAP_F_B: its parts, and its text. */
function readPass(text) {
  const parts = [...text.matchAll(PART)].map(([, stage, kind, mb]) =>
    ({ kind, stage: +stage, mb: +mb }));
  return { kind: parts.length > 1 ? "OVERLAP_F_B" : parts[0].kind, stage: parts[0].stage, parts,
           text };
}

function reduceGrad(stage) {
  return { kind: "REDUCE_GRAD", stage, parts: [{ kind: "REDUCE_GRAD", stage, mb: -1 }],
           text: `${stage}REDUCE_GRAD` };
}

/** The program with the reduction of each stage's gradients after the stage's last B or W. */
function withReduceGrad(program) {
  const missing = new Set(program.map(pass => pass.stage)), found = [...program];
  for (let at = program.length - 1; at >= 0 && missing.size; at--) {
    const { kind, stage } = program[at].parts.at(-1);
    if ((kind === "B" || kind === "W") && missing.delete(stage))
      found.splice(at + 1, 0, reduceGrad(stage));
  }
  return found;
}

/** One training step: the passes of each worker, in order. stageToRank: the worker of each stage,
    from pipeline/placements.py. */
class Schedule {
  constructor({ name, p, m, stageToRank, programs }) {
    Object.assign(this, { name, p, m, stageToRank, stages: stageToRank.length });
    this.programs = programs.map(program => typeof program === "string"
      ? program.split(" ").map(readPass) : program);
  }

  /** The same schedule with different programs. */
  changed(programs) { return new Schedule({ ...this, programs }); }

  stagesOf(rank) {
    return this.stageToRank.map((_, stage) => stage)
      .filter(stage => this.stageToRank[stage] === rank);
  }

  /** The name of a pass in texts; the stage is omitted if each worker holds only one. */
  label(pass) {
    const alone = this.stages === this.p;
    return pass.parts.map(({ kind, stage, mb }) =>
      alone ? `${kind}${mb}` : `${stage}${kind}${mb}`).join("&");
  }

  message(direction, stage, mb) {
    const from = direction === "F" ? stage - 1 : stage + 1;
    const source = this.stageToRank[from], target = this.stageToRank[stage];
    return { direction, stage, mb, from, source, target, remote: source !== target,
             key: `${direction} ${stage} ${mb}` };
  }

  /** The messages that an instruction receives and sends. Activations go up by one stage, input
      gradients down by one; nothing enters or leaves the model at its ends. */
  neighbours(instr) {
    const taken = [], given = [], inside = stage => stage >= 0 && stage < this.stages;
    for (const { kind, stage, mb } of instr.parts) {
      if (kind !== "F" && kind !== "B" && kind !== "I") continue;
      const direction = kind === "F" ? "F" : "B", step = kind === "F" ? 1 : -1;
      if (inside(stage - step)) taken.push(this.message(direction, stage, mb));
      if (inside(stage + step)) given.push(this.message(direction, stage + step, mb));
    }
    return [taken, given];
  }

  /** The messages between workers that an instruction waits for, and those that it sends. */
  onWire(instr) { return this.neighbours(instr).map(all => all.filter(one => one.remote)); }

  /** The lines of a CSV file, which mpipar schedule --from-csv reads. */
  csv() {
    const rows = this.programs.map(program => program.map(pass => pass.text).join(","));
    return [...rows, ""].join("\n");
  }
}


// The proof that an order can run, with the messages of pipeline/check.py. A browser test keeps the
// two equal: the first problem here is the text that Python raises.
const NEEDED = { B: "F", I: "F", W: "I" };  // which pass of stage and microbatch must run before
const RIVAL = { B: "I", I: "B" };           // the two forms of a backward exclude each other
const STASH_CHANGE = { F: 1, B: -1, W: -1 };  // a stash lives until its last reader
const nameOf = (kind, stage, mb) => `${stage}${kind}${mb}`;

/** Every problem as {text, instr, needs}, in order; [] if the schedule can run. instr: the pass
    that cannot run. needs: the parts that it lacks. */
function problemsOf(schedule) {
  const lowered = schedule.changed(schedule.programs.map(withReduceGrad)), found = [];
  lowered.programs.forEach((program, rank) => {
    for (const { position, reason, needs = [] } of programProblems(lowered, rank)) {
      const instr = program[position], word = instr ? instr.text : "end of the program";
      found.push({ instr, needs, text: `schedule ${schedule.name}: rank ${rank} position `
        + `${position} (${word}): ${reason}` });
    }
  });
  return found.length ? found : deadlock(lowered);
}

/** What is wrong with a worker's program alone; later problems may follow from the first. */
function* programProblems(schedule, rank) {
  const program = schedule.programs[rank], held = schedule.stagesOf(rank), at = new Map();
  if (!program.length) yield { position: 0, reason: "this rank has nothing to do" };
  for (const [position, instr] of program.entries()) {
    for (const part of instr.parts) {
      const name = nameOf(part.kind, part.stage, part.mb), before = at.get(name);
      const reason = misfit(schedule, held, part);
      if (reason) yield { position, reason };
      if (before) yield { position, reason: `has already run at position ${before.position}` };
      at.set(name, { part, position });
    }
  }
  yield* orderProblems(schedule, at);
  for (const reason of missingParts(schedule, rank, at))
    yield { position: program.length, reason: `${reason} is missing` };
  for (const { part, position } of at.values()) {
    const reduced = at.get(nameOf("REDUCE_GRAD", part.stage, -1))?.position ?? Infinity;
    if ((part.kind === "B" || part.kind === "W") && position > reduced)
      yield { position: reduced, reason: `stage ${part.stage} has a backward at position `
        + position };
  }
}

/** Why a part cannot be on this worker; null if it can. */
function misfit(schedule, held, { kind, stage, mb }) {
  if (!held.includes(stage))
    return `stage ${stage} is not on this rank, which holds [${held.join(", ")}]`;
  if (kind !== "REDUCE_GRAD" && mb >= schedule.m)
    return `microbatch ${mb} does not exist, there are ${schedule.m}`;
  return null;
}

/** Passes that precede what they need from this worker, including neighbouring stages. */
function* orderProblems(schedule, at) {
  const place = (kind, stage, mb) => at.get(nameOf(kind, stage, mb))?.position ?? Infinity;
  for (const { part, position } of at.values()) {
    const { kind, stage, mb } = part, needed = [];
    if (NEEDED[kind]) needed.push([nameOf(NEEDED[kind], stage, mb), [NEEDED[kind]], stage]);
    for (const { remote, direction, from } of schedule.neighbours({ parts: [part] })[0]) {
      if (remote) continue;
      needed.push(direction === "F" ? [`${from}F${mb}`, ["F"], from]
        : [`the backward of ${from}F${mb}`, ["B", "I"], from]);
    }
    for (const [what, kinds, source] of needed) {
      const where = Math.min(...kinds.map(one => place(one, source, mb)));
      if (where >= position) yield { position,
        needs: kinds.map(one => ({ kind: one, stage: source, mb })),
        reason: `needs ${what}, which ` + (where === Infinity ? "this rank never runs"
          : `stands at ${where}`) };
    }
    const rival = place(RIVAL[kind], stage, mb);
    if (rival < position) yield { position,
      reason: `the other form of this backward has run at position ${rival}` };
  }
}

/** The passes and gradient reductions of this worker that its program lacks. */
function* missingParts(schedule, rank, at) {
  for (const stage of schedule.stagesOf(rank)) {
    for (let mb = 0; mb < schedule.m; mb++) {
      const [forward, full, inputs, weight] = [..."FBIW"].map(kind =>
        at.has(nameOf(kind, stage, mb)));
      if (!forward) yield `${stage}F${mb}`;
      if (!full && !inputs) yield `${stage}B${mb} (or ${stage}I${mb} and ${stage}W${mb})`;
      if (inputs && !weight) yield `${stage}W${mb}`;
    }
    if (!at.has(nameOf("REDUCE_GRAD", stage, -1))) yield `${stage}REDUCE_GRAD`;
  }
}

/** A problem that names a cycle of workers waiting for each other, or none. Each worker runs until
    a message is missing; the result does not depend on the order of running them. */
function deadlock(schedule) {
  const next = schedule.programs.map(() => 0), posted = new Set(), waiting = new Map();
  const runnable = schedule.programs.map((_, rank) => rank);
  while (runnable.length) {
    const rank = runnable.shift();
    for (let instr; (instr = schedule.programs[rank][next[rank]]); next[rank]++) {
      const [received, sent] = schedule.onWire(instr);
      const missing = received.find(message => !posted.has(message.key));
      if (missing) { waiting.set(missing.key, { rank, message: missing }); break; }
      for (const { key } of received) posted.delete(key);
      for (const { key } of sent) posted.add(key);
      for (const { key } of sent) {
        if (waiting.has(key)) runnable.push(waiting.get(key).rank);
        waiting.delete(key);
      }
    }
  }
  return waiting.size ? [circle(schedule, waiting)] : [];
}

/** The cycle as text; each of its workers waits for a result of the next one. */
function circle(schedule, waiting) {
  const awaited = new Map([...waiting.values()].map(({ rank, message }) => [rank, message]));
  const path = [awaited.keys().next().value], peerOf = rank => awaited.get(rank).source;
  while (!path.includes(peerOf(path.at(-1)))) path.push(peerOf(path.at(-1)));
  const ring = path.slice(path.indexOf(peerOf(path.at(-1))));
  const place = (rank, { key }) => schedule.programs[rank].findIndex(instr =>
    schedule.neighbours(instr).flat().some(one => one.key === key));
  const words = (rank, message) => {
    const position = place(rank, message);
    return `rank ${rank} position ${position} (${schedule.programs[rank][position].text})`;
  };
  const lines = ring.map(rank => `  ${words(rank, awaited.get(rank))} waits for `
    + words(peerOf(rank), awaited.get(rank)));
  return { instr: schedule.programs[ring[0]][place(ring[0], awaited.get(ring[0]))], needs: [],
           text: [`schedule ${schedule.name}: deadlock, these ranks wait for each other in a`
                  + " circle:", ...lines].join("\n") };
}

/** The peak number of chunk activations that a worker holds. */
function peakStash(program) {
  let held = 0, peak = 0;
  for (const { kind } of program.flatMap(instr => instr.parts)) {
    held += STASH_CHANGE[kind] ?? 0;
    peak = Math.max(peak, held);
  }
  return peak;
}


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
