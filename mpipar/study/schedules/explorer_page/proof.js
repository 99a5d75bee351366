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
      if (before) yield { position, reason: part.kind === "REDUCE_GRAD"
        ? `the stage's gradients were reduced at ${before.position}`
        : `has already run at position ${before.position}` };
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
