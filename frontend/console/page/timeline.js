// Timeline of a request: its spans in order of time, from the frontend's measurements or the workers' reports. No DOM.
export const LANES = {
  frontend: "Frontend",
  conductor: "Conductor",
  prefill: "Prefill",
  push: "KV push",
  decode: "Decode",
  tokens: "Tokens at the frontend",
};

// Parts of the TTFT and of the hand-off: [lane, stage, what happened, kind of the bar].
const PARTS = {
  tokenize: ["frontend", "Frontend", "received, checked, tokenised", "work"],
  sibling: ["frontend", "Frontend", "waited for the prompt's first choice", "wait"],
  schedule: ["conductor", "Conductor", "placed the request", "work"],
  lost: ["prefill", "Lost attempts", "placed on nodes that failed", "lost"],
  queue: ["prefill", "Prefill", "waited in the queue", "wait"],
  load: ["prefill", "Prefill", "loaded reused KV", "move"],
  prefill: ["prefill", "Prefill", "computed the rest of the prompt", "work"],
  delivery: ["frontend", "Frontend", "received the first token", "work"],
};
const HANDOFF = {
  tail: ["push", "KV push", "pushed the last KV to the decode node", "move"],
  join: ["decode", "Decode", "verified it, joined the batch", "wait"],
  step: ["decode", "Decode", "its first step", "work"],
  delivery: ["frontend", "Frontend", "received the next token", "work"],
};
// What follows the phase that a worker reported.
const PHASES = {
  prefill_started: ["prefill", "Prefill", "computes the prompt", "work"],
  prefill_ended: ["push", "KV push", "hands over", "move"],
  decode_joined: ["decode", "Decode", "decodes", "work"],
  ended: ["decode", "Ended", "cleans up", "wait"],
};

const spanOf = ([lane, stage, what, kind], node, from, took) => ({ lane, stage, what, kind, node, from, took });

// The frontend's record, or else the conductor's: {isMeasured, spans, overlap, tokens, focusS, wholeS}, times in seconds
// after the arrival. `overlap`: pushes during the computation, whose start is not measured. `tokens`: [first, next, last],
// null if it is not known. `focusS`: end of the part in which the request moves from node to node.
export function timelineOf(known, local) {
  const found = local?.ttft ? measured(local) : reported(known);
  return found.spans.length ? found : null;
}

function measured(local) {
  const spans = [];
  let from = 0;
  const add = (part, took, node) => {
    if (!(took > 0)) return;
    spans.push(spanOf(part, node, from, took));
    from += took;
  };
  const nodeOf = (lane) => (lane === "prefill" || lane === "push" ? local.prefill : lane === "decode" ? local.decode : "");
  for (const [part, took] of Object.entries(local.ttft)) {
    const how = PARTS[part] ?? ["frontend", part, "", "work"];
    add(how, took, nodeOf(how[0]));
  }
  const firstS = from;
  // The hand-off goes on while the first token is on its way, which may take longer than the next one's.
  from += Math.min(0, local.handoff?.delivery ?? 0);
  const computed = spans.find((span) => span.lane === "prefill" && span.kind === "work");
  for (const [part, took] of Object.entries(local.handoff ?? {})) {
    const how = HANDOFF[part] ?? ["frontend", part, "", "work"];
    add(how, took, nodeOf(how[0]));
  }
  const focusS = from;
  const decodes = local.decode || local.prefill;
  if (local.generated > 1) add(["decode", "Decode", "all further tokens, until the end", "work"], local.seconds - from, decodes);
  return {
    isMeasured: true,
    spans,
    overlap: local.handoff && computed ? { from: computed.from, took: computed.took } : null,
    tokens: [firstS, local.handoff ? focusS : null, local.generated > 1 ? from : null],
    focusS,
    wholeS: from,
  };
}

function reported(known) {
  const spans = [];
  let from = 0;
  let last = ["conductor", "Conductor", "placed it, until a worker began", "work"];
  let node = "";
  const add = (until) => {
    spans.push(spanOf(last, node, from, Math.max(0, until - from)));
    from = Math.max(from, until);
  };
  const marks = known?.marks ?? [];
  for (const mark of marks) {
    add(mark.after_s);
    last = PHASES[mark.phase] ?? ["frontend", mark.phase, "", "work"];
    node = mark.node;
  }
  if (marks.length && known.ended_after_s !== null) add(known.ended_after_s);
  const joined = marks.find((mark) => mark.phase === "decode_joined");
  return {
    isMeasured: false,
    spans,
    overlap: null,
    tokens: [known?.ttft_s ?? null, null, known?.ttft_s && known.ended_after_s ? known.ended_after_s : null],
    focusS: Math.max(joined?.after_s ?? 0, known?.ttft_s ?? 0) || from,
    wholeS: Math.max(from, known?.ttft_s ?? 0),
  };
}

// Ticks of an axis from 0 to `most`: at most `count` steps of 1, 2 or 5 times a power of ten.
export function ticks(most, count) {
  const least = most / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least * 0.999);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => index * step);
}
