// Path of one request: frontend, conductor, prefill, transfer, decode, with times, placement reasons and predictions.
import * as api from "./api.js";
import { barKey, stacked } from "./bars.js";
import { diagram, legend } from "./diagram.js";
import { h, say } from "./dom.js";
import { count, day, NONE, seconds } from "./format.js";
import { reasonOf } from "./overview.js";
import { timelineOf } from "./timeline.js";

const SOURCES = { memory: "its pool node's memory", ssd: "its pool node's SSD", remote: "another pool node" };
const FROM = { header: "the request itself", tenant: "its tenant", class: "its class", model: "the model", cluster: "the cluster", none: "no objective" };

export class Path {
  constructor() {
    this.id = "";
    this.node = h("div");
    this.said = "";
    this.isOpen = false;
    this.loading = false;
    this.ticks = 0;
  }

  async load(id) {
    this.id = id;
    this.said = "";
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
    this.#announce(told.request_id, known?.outcome ?? record?.outcome ?? local?.outcome);
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

  // Announces the outcome once: the display of a running request is refreshed again and again.
  #announce(id, outcome) {
    const text = `Path of ${id}: ${outcome === "open" ? "under way" : (outcome ?? "no record")}`;
    if (text !== this.said) say(text);
    this.said = text;
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
    ["Prompt", `${count(known?.prompt_tokens ?? record?.input_length ?? local?.prompt_tokens)} tokens, of which ${count(local?.cached_tokens ?? known?.cached_tokens)} were reused${inOwnMemory(local)}`],
    ["Answer", `${count(local?.generated ?? known?.generated ?? record?.output_length)} tokens${outcome === "open" ? " so far" : ""}, in ${count(local?.attempts ?? known?.attempts ?? record?.attempts?.length)} attempt(s)`],
  ];
  if (known?.session) rows.push(["Session", h("a", { href: `#/sessions/${known.session}`, class: "mono" }, known.session)]);
  return h("dl", { class: "facts" }, ...rows.flatMap(([label, value]) => [h("dt", null, label), h("dd", null, value)]));
}

function inOwnMemory(local) {
  const own = local ? local.cached_tokens - Object.values(local.cached_from).reduce((sum, tokens) => sum + tokens, 0) : 0;
  return own > 0 ? `, ${count(own)} of them in the worker's own memory` : "";
}

// The picture, and the same times as a list.
function steps(known, local) {
  const timeline = timelineOf(known, local);
  if (!timeline) return h("p", { class: "note" }, "No times have been reported yet.");
  const source = timeline.isMeasured ? "as measured by this frontend" : "as reported by the workers to the conductor, with some delay; the exact times are at the frontend that served it";
  return h(
    "div",
    null,
    h("h3", null, "Time breakdown"),
    h("p", { class: "note" }, source),
    diagram(timeline, known),
    legend(timeline, known),
    h("ol", { class: "path" }, ...timeline.spans.map((span) => step(span, local))),
    tokensOf(timeline, known, local),
  );
}

const step = ({ stage, what, kind, node, took }, local) =>
  h("li", null, h("span", { class: "what" }, stage, node ? ` on ${node}` : "", h("small", null, kind === "move" && stage === "Prefill" ? `${what}${loaded(local)}` : what)), h("span", { class: "took" }, seconds(took)));

// Sources of the loaded KV.
function loaded(local) {
  const found = Object.entries(local?.cached_from ?? {}).filter(([, tokens]) => tokens > 0);
  return found.length ? `: ${found.map(([from, tokens]) => `${count(tokens)} tokens from ${SOURCES[from] ?? from}`).join(", ")}` : "";
}

function tokensOf({ tokens: [firstS, , lastS] }, known, local) {
  const generated = local?.generated ?? known?.generated ?? 0;
  const tbtS = local?.tbt_s ?? known?.tbt_s;
  if (firstS === null) return h("span");
  const rest = lastS !== null && tbtS ? `; ${count(generated)} tokens in all, ${seconds(tbtS)} apart on average` : "";
  return h("p", { class: "note" }, `The first token arrived after ${seconds(firstS)}${rest}.`);
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

const TERMS = [["transfer_s", "move", "transfer"], ["queue_s", "wait", "queue"], ["prefill_s", "work", "prefill"]];
const ttftOf = (each) => TERMS.reduce((sum, [term]) => sum + each[term], 0);

// How much longer another candidate would have taken, and the term that contributes most.
function more(each, chosen) {
  const [longer, name] = TERMS.map(([term, , label]) => [each[term] - chosen[term], label]).sort((a, b) => b[0] - a[0])[0];
  const by = ttftOf(each) - ttftOf(chosen);
  if (each === chosen) return "chosen";
  return by === 0 ? "equal" : `${by < 0 ? "−" : "+"}${seconds(Math.abs(by))}${longer > 0 ? `, most of it ${name}` : ""}`;
}

function attemptOf(attempt, index, all) {
  const decision = attempt.decision ?? {};
  const considered = decision.considered ?? {};
  const head = all > 1 ? [h("p", null, `Attempt ${index + 1}, ${seconds(attempt.at_ms / 1000)} after its arrival`)] : [];
  const prefill = considered.prefill ?? [];
  const decode = considered.decode ?? [];
  const isPlaced = Boolean(decision.prefill);
  const compare = (each) => (isPlaced || each !== prefill[0] ? more(each, prefill[0]) : "best");
  if (decision.message) head.push(h("p", { class: "wrap" }, decision.message));
  if (prefill.length) {
    const most = Math.max(...prefill.map(ttftOf), 1e-9);
    head.push(
      candidates(
        `Prefill: the best ${prefill.length} of ${considered.num_prefill} candidates; ${isPlaced ? "the first was chosen" : "none was chosen"}. Transfer, queue and prefill sum to the predicted TTFT`,
        ["Node", "To scale", "Transfer", "Queue", "Prefill", "Sum", "Compared", "Blocks reused", "In own memory"],
        prefill.map((each) => [each.node_id, stacked(TERMS.map(([term, kind]) => [kind, each[term]]), most), seconds(each.transfer_s), seconds(each.queue_s), seconds(each.prefill_s), seconds(ttftOf(each)), compare(each), count(each.reuse_blocks), count(each.local_blocks ?? 0)]),
      ),
      barKey(TERMS.map(([, kind, label]) => [kind, label])),
    );
  }
  if (decision.reuse_blocks) head.push(h("p", null, reused(decision)));
  if (decode.length) {
    const most = Math.max(...decode.map((each) => each.tbt_s), 1e-9);
    head.push(
      candidates(
        `Decode: the best ${decode.length} of ${considered.num_decode} candidates`,
        ["Node", "To scale", "Time between tokens", "KV tokens free"],
        decode.map((each) => [each.node_id, stacked([["work", each.tbt_s]], most), seconds(each.tbt_s), count(each.free_tokens)]),
      ),
    );
  }
  if (considered.undivided) head.push(h("p", { class: "note" }, colocated(considered.undivided)));
  return head;
}

// The holders also cover the blocks in the node's own memory, which are not loaded.
function reused({ reuse_blocks: blocks, local_blocks: own = 0, holders = [] }) {
  const from = own ? [`${count(own)} in the node's own memory`] : [];
  for (const { pool, first_block: first, num_blocks: number, ssd_blocks: onSsd = 0 } of holders) {
    const loaded = first + number - Math.max(first, own);
    if (loaded > 0) from.push(`${count(loaded)} from ${pool}${onSsd && own <= first ? ` (${count(onSsd)} on SSD)` : ""}`);
  }
  return `Reused: ${count(blocks)} blocks of the prompt${from.length ? `, ${from.join(", ")}` : ""}.`;
}

const WHY_NOT = { no_room: "it has no room", not_sooner: "it is not faster", unknown_chunks: "the size of its chunks is not known", slows_others: "it would slow other answers too much" };

const colocated = (each) => `Prefill on the decode node ${each.node_id}: predicted TTFT ${seconds(ttftOf(each))} instead of ${seconds(each.divided_s)}; ${each.is_better ? "it was preferred" : `not chosen${each.why_not ? `: ${WHY_NOT[each.why_not] ?? each.why_not}` : ""}`}.`;

function candidates(caption, labels, rows) {
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      null,
      h("caption", null, h("span", null, caption)),
      h("thead", null, h("tr", null, ...labels.map((label, index) => h("th", { scope: "col", class: index && !(rows[0][index] instanceof Node) ? "number" : null }, label)))),
      h("tbody", null, ...rows.map((row) => h("tr", null, ...row.map((cell, index) => (index ? h("td", { class: cell instanceof Node ? null : "number" }, cell) : h("th", { scope: "row", class: "wrap" }, cell)))))),
    ),
  );
}
