// Path of one request: frontend, conductor, prefill, transfer, decode, with times, placement reasons and predictions.
import * as api from "./api.js";
import { h, svg } from "./dom.js";
import { count, day, NONE, seconds } from "./format.js";
import { reasonOf } from "./overview.js";

const PARTS = {
  tokenize: ["Frontend", "received, checked, tokenised"],
  sibling: ["Frontend", "waited for the prompt's first choice"],
  schedule: ["Conductor", "placed the request"],
  lost: ["Lost attempts", "placed on nodes that failed"],
  queue: ["Prefill", "waited in the queue"],
  load: ["Prefill", "loaded reused KV"],
  prefill: ["Prefill", "computed the rest of the prompt"],
  delivery: ["Frontend", "received the first token"],
};
const HANDOFF = {
  tail: ["Transfer", "pushed the last KV to the decode node"],
  join: ["Decode", "verified it, joined the batch"],
  step: ["Decode", "its first step"],
  delivery: ["Frontend", "received the next token"],
};
const PHASES = {
  prefill_started: ["Prefill", "began"],
  prefill_ended: ["Prefill", "ended"],
  decode_joined: ["Decode", "joined the batch"],
  ended: ["Ended", "released its resources"],
};
const FROM = { header: "the request itself", tenant: "its tenant", class: "its class", model: "the model", cluster: "the cluster", none: "no objective" };

export class Path {
  constructor() {
    this.id = "";
    this.node = h("div", { "aria-live": "polite" });
    this.isOpen = false;
    this.loading = false;
    this.ticks = 0;
  }

  async load(id) {
    this.id = id;
    this.node.replaceChildren(h("p", { class: "loading" }, "Loading from the frontend and the conductors…"));
    await this.#fetch();
  }

  // Refreshed while the request is running.
  tick() {
    this.ticks += 1;
    if (this.isOpen && !this.loading && this.ticks % 2 === 0) this.#fetch();
  }

  async #fetch() {
    const id = this.id;
    this.loading = true;
    try {
      const told = await api.request(id);
      if (id === this.id) this.#show(told);
    } catch (error) {
      if (id === this.id) this.node.replaceChildren(h("p", { class: "outcome bad", role: "alert" }, `The path cannot be shown: ${error.message}`));
      this.isOpen = false;
    } finally {
      this.loading = false;
    }
  }

  #show(told) {
    const known = told.conductors.map((each) => each.remembered).find(Boolean);
    const record = told.conductors.flatMap((each) => each.records ?? []).sort((a, b) => b.at - a.at)[0];
    const local = told.front_door;
    this.isOpen = (known?.outcome ?? local?.outcome) === "open";
    const problems = told.conductors.filter((each) => each.problem).map((each) => `${each.target}: ${each.problem}`);
    if (!known && !record && !local) {
      this.node.replaceChildren(
        h("p", { class: "outcome warn" }, `There is no record of ${told.request_id}: it never arrived here, or too long ago (conductors keep the last 4,096 requests that they evaluated; a decision log goes back further).`),
        ...problems.map((text) => h("p", { class: "note wrap" }, text)),
      );
      return;
    }
    this.node.replaceChildren(
      facts(told.request_id, known, record, local),
      steps(known, local),
      compared(known, local),
      ...why(record, told.conductors),
      ...problems.map((text) => h("p", { class: "note wrap" }, `No answer: ${text}`)),
    );
  }
}

function facts(id, known, record, local) {
  const outcome = known?.outcome ?? record?.outcome ?? local?.outcome;
  const reason = known?.reason;
  const rows = [
    ["Request", h("code", { class: "wrap" }, id)],
    ["Arrived", day(known?.at_s ?? record?.at ?? local?.at_s)],
    ["Outcome", (outcome === "open" ? "under way" : outcome) + (reason ? `: ${reason} (${reasonOf(reason)})` : "")],
    ["Model and class", `${known?.model ?? record?.model ?? local?.model}, ${known?.slo_class || record?.slo_class || "no class"}`],
    ["Prompt", `${count(known?.prompt_tokens ?? record?.input_length ?? local?.prompt_tokens)} tokens, of which ${count(local?.cached_tokens ?? known?.cached_tokens)} were reused`],
    ["Answer", `${count(local?.generated ?? known?.generated ?? record?.output_length)} tokens${outcome === "open" ? " so far" : ""}, in ${count(local?.attempts ?? known?.attempts ?? record?.attempts?.length)} attempt(s)`],
  ];
  return h("dl", { class: "facts" }, ...rows.flatMap(([label, value]) => [h("dt", null, label), h("dd", null, value)]));
}

// The frontend's measurements, or else the conductor's reports.
function steps(known, local) {
  const rows = local?.ttft ? measured(local) : heard(known);
  if (!rows.length) return h("p", { class: "note" }, "No times have been reported yet.");
  const whole = Math.max(...rows.map((row) => row.from + row.took), 1e-9);
  const list = h("ol", { class: "path" }, ...rows.map((row) => step(row, whole)));
  const source = local?.ttft ? "as measured by this frontend" : "as reported by the workers to the conductor, with some delay; the exact times are at the frontend that served it";
  return h("div", null, h("h3", null, "Time breakdown"), h("p", { class: "note" }, source), list);
}

function step({ stage, what, node, from, took }, whole) {
  const start = (100 * from) / whole;
  return h(
    "li",
    { class: "stage" },
    h("span", { class: "what" }, stage, node ? ` on ${node}` : "", h("small", null, what)),
    h("span", { class: "took" }, seconds(took)),
    svg(
      "svg",
      { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "track", x: 0, y: 4, width: 100, height: 4 }),
      svg("rect", { class: "span", x: start.toFixed(2), y: 1, width: Math.max(0.6, (100 * took) / whole).toFixed(2), height: 10 }),
    ),
  );
}

function measured(local) {
  const rows = [];
  let from = 0;
  const add = ([stage, what], took, node) => {
    if (!(took > 0)) return;
    rows.push({ stage, what, node, from, took });
    from += took;
  };
  for (const [part, took] of Object.entries(local.ttft)) add(PARTS[part] ?? [part, ""], took, PARTS[part]?.[0] === "Prefill" ? local.prefill : "");
  for (const [part, took] of Object.entries(local.handoff ?? {})) add(HANDOFF[part] ?? [part, ""], took, HANDOFF[part]?.[0] === "Decode" ? local.decode : "");
  const left = local.seconds - from;
  if (local.generated > 1) add(["Decode", "all further tokens, until the end"], left, local.decode || local.prefill);
  return rows;
}

function heard(known) {
  if (!known) return [];
  const rows = [];
  let from = 0;
  let last = ["Conductor", "placed it, until a worker began", ""];
  for (const mark of known.marks) {
    rows.push({ stage: last[0], what: last[1], node: last[2], from, took: Math.max(0, mark.after_s - from) });
    from = mark.after_s;
    const [stage, what] = PHASES[mark.phase] ?? [mark.phase, ""];
    const next = { prefill_started: "computes the prompt", prefill_ended: "hands over", decode_joined: "decodes", ended: "cleans up" }[mark.phase];
    last = [mark.phase === "prefill_ended" ? "Transfer" : stage, next ?? what, mark.node];
  }
  if (known.ended_after_s !== null && known.marks.length) rows.push({ stage: last[0], what: last[1], node: last[2], from, took: Math.max(0, known.ended_after_s - from) });
  return rows;
}

function compared(known, local) {
  if (!known) return h("span");
  const cells = [
    ["Time to first token", known.predicted_ttft_s, known.ttft_objective_s, known.ttft_from, known.ttft_s],
    ["of which in queues", known.predicted_wait_s, 0, "none", local?.ttft?.queue],
    ["Time between tokens", known.predicted_tbt_s, known.tbt_objective_s, known.tbt_from, known.tbt_s],
  ];
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Predicted and measured" },
    h(
      "table",
      null,
      h("caption", null, h("span", null, "Predicted, objective, measured")),
      h("thead", null, h("tr", null, ...["", "Predicted", "Objective", "Measured"].map((label, index) => h(index ? "th" : "td", index ? { scope: "col", class: "number" } : null, label)))),
      h(
        "tbody",
        null,
        ...cells.map(([label, predicted, objective, from, actual]) =>
          h("tr", null, h("th", { scope: "row" }, label), h("td", { class: "number" }, seconds(predicted)), h("td", { class: "number" }, objective ? `${seconds(objective)} (${FROM[from] ?? from})` : "no limit"), h("td", { class: "number" }, actual ? seconds(actual) : NONE)),
        ),
      ),
    ),
  );
}

// The candidates, if they are in a decision log.
function why(record, conductors) {
  const title = h("h3", null, "Placement");
  if (!record) {
    const hasLog = conductors.some((each) => each.log);
    return [title, h("p", { class: "note" }, hasLog ? "The decision log has no record of this request." : "Candidates are recorded only if the conductor keeps a decision log: moonpool serve --decision-log FOLDER.")];
  }
  return [title, ...record.attempts.flatMap((attempt, index) => attemptOf(attempt, index, record.attempts.length))];
}

function attemptOf(attempt, index, all) {
  const decision = attempt.decision ?? {};
  const considered = decision.considered ?? {};
  const head = all > 1 ? [h("p", null, `Attempt ${index + 1}, ${seconds(attempt.at_ms / 1000)} after its arrival`)] : [];
  const prefill = considered.prefill ?? [];
  const decode = considered.decode ?? [];
  if (decision.message) head.push(h("p", { class: "wrap" }, decision.message));
  if (prefill.length)
    head.push(
      candidates(
        `Prefill: the best ${prefill.length} of ${considered.num_prefill} candidates; the first was chosen. The columns Transfer, Queue and Prefill sum to the predicted TTFT`,
        ["Node", "Transfer", "Queue", "Prefill", "Sum", "Blocks reused", "In own memory"],
        prefill.map((each) => [each.node_id, seconds(each.transfer_s), seconds(each.queue_s), seconds(each.prefill_s), seconds(each.transfer_s + each.queue_s + each.prefill_s), count(each.reuse_blocks), count(each.local_blocks ?? 0)]),
      ),
    );
  if (decode.length)
    head.push(
      candidates(
        `Decode: the best ${decode.length} of ${considered.num_decode} candidates`,
        ["Node", "Time between tokens", "KV tokens free"],
        decode.map((each) => [each.node_id, seconds(each.tbt_s), count(each.free_tokens)]),
      ),
    );
  return head;
}

function candidates(caption, labels, rows) {
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      null,
      h("caption", null, h("span", null, caption)),
      h("thead", null, h("tr", null, ...labels.map((label, index) => h("th", { scope: "col", class: index ? "number" : null }, label)))),
      h("tbody", null, ...rows.map((row) => h("tr", null, ...row.map((cell, index) => (index ? h("td", { class: "number" }, cell) : h("th", { scope: "row", class: "wrap" }, cell)))))),
    ),
  );
}
