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
