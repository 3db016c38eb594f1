// Decisions as they are made: the newest requests of all conductors, filtered, and held still while the feed is paused.
import { h, setAttribute, setText } from "./dom.js";
import { clock, count, NONE, seconds } from "./format.js";
import { reasonOf } from "./overview.js";
import { DataTable, name } from "./table.js";

const MOST = 500; // requests kept in the page
const KINDS = { finished: "good", rejected: "bad", failed: "bad", cancelled: "warn", open: "" };
const SIGNS = { finished: "✓", rejected: "✕", failed: "✕", cancelled: "–", open: "…" };
const OUTCOMES = { "": "all outcomes", placed: "placed", rejected: "rejected", open: "under way", finished: "finished", failed: "failed", cancelled: "cancelled" };

const wordsOf = (request) => (request.outcome !== "open" ? request.outcome : request.isFollowed ? "under way" : "placed");
export const outcomeOf = (request) =>
  h("span", { class: `state ${KINDS[request.outcome] ?? ""}`, title: request.reason ? reasonOf(request.reason) : null }, `${SIGNS[request.outcome] ?? "?"} ${wordsOf(request)}${request.reason ? `: ${request.reason}` : ""}`);

// Predicted and measured.
const both = (predicted, actual) => `${predicted ? seconds(predicted) : NONE} → ${actual === null || actual === undefined ? NONE : seconds(actual)}`;
const reusedOf = (request) => (request.outcome === "finished" ? request.cached_tokens : request.reused_tokens);

export class Feed {
  constructor() {
    const filters = { model: ["Model", "all models"], tenant: ["Tenant", "all tenants"], outcome: ["Outcome", null] };
    this.filters = {};
    const labels = Object.entries(filters).map(([key, [label, all]]) => {
      const select = h("select", { id: `request-${key}`, onchange: () => this.#draw() }, all === null ? Object.entries(OUTCOMES).map(([value, text]) => h("option", { value }, text)) : h("option", { value: "" }, all));
      this.filters[key] = select;
      return h("label", { for: select.id }, label, select);
    });
    this.pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.#toggle() }, "Pause");
    this.shown = h("p", { class: "note" });
    this.missed = h("p", { class: "note" });
    this.table = new DataTable({
      caption: "Newest first; predicted → measured",
      empty: "No request has been decided yet, or none matches.",
      key: (row) => row.request_id,
      sort: "at",
      descending: true,
      tall: true,
      paged: true,
      columns: [
        { name: "at", label: "At", value: (row) => row.at_s, mark: (row) => clock(row.at_s), show: (row) => clock(row.at_s) },
        { name: "id", label: "Request", isHead: true, value: (row) => row.request_id, show: (row) => h("a", { href: `#/requests/${encodeURIComponent(row.request_id)}`, class: "name mono", title: row.request_id }, row.request_id) },
        { name: "outcome", label: "Decision", value: (row) => `${wordsOf(row)} ${row.reason}`, show: outcomeOf },
        { name: "model", label: "Model", value: (row) => row.model, show: (row) => name(row.model) },
        { name: "tenant", label: "Tenant", value: (row) => row.tenant || "(none)", show: (row) => name(row.tenant || "(none)") },
        { name: "class", label: "Class", value: (row) => row.slo_class || "(none)", show: (row) => name(row.slo_class || "(none)") },
        { name: "prefill", label: "Prefill", value: (row) => row.prefill || NONE, show: (row) => (row.prefill ? name(row.prefill) : NONE) },
        { name: "decode", label: "Decode", value: (row) => row.decode || (row.prefill ? "same node" : NONE), show: (row) => (row.decode ? name(row.decode) : row.prefill ? "same node" : NONE) },
        { name: "prompt", label: "Prompt", number: true, value: (row) => row.prompt_tokens, show: (row) => count(row.prompt_tokens) },
        { name: "reused", label: "Reused", number: true, value: reusedOf, show: (row) => count(reusedOf(row)) },
        { name: "ttft", label: "TTFT", number: true, value: (row) => row.ttft_s ?? row.predicted_ttft_s, mark: (row) => both(row.predicted_ttft_s, row.ttft_s), show: (row) => both(row.predicted_ttft_s, row.ttft_s) },
        { name: "tbt", label: "TBT", number: true, value: (row) => row.tbt_s ?? row.predicted_tbt_s, mark: (row) => both(row.predicted_tbt_s, row.tbt_s), show: (row) => both(row.predicted_tbt_s, row.tbt_s) },
      ],
    });
    this.node = h("div", null, h("div", { class: "form" }, ...labels, this.pause), this.shown, this.missed, this.table.node);
    this.requests = new Map(); // by id, oldest first
    this.decided = new Map(); // [incarnation, decisions so far] by conductor
    this.numMissed = 0;
    this.numShown = 0;
    this.waiting = new Set(); // ids that came during the pause
    this.isPaused = false;
  }

  update(state) {
    const here = new Map(state.requests.map((request) => [request.request_id, request]));
    this.#count(state, [...here.values()].filter((request) => this.#isNew(request)).length);
    for (const request of this.requests.values()) if (!here.has(request.request_id)) request.isFollowed = false;
    for (const request of [...here.values()].reverse()) {
      if (this.isPaused && !this.requests.has(request.request_id)) this.waiting.add(request.request_id);
      this.requests.set(request.request_id, { ...request, isFollowed: true });
    }
    for (const id of this.requests.keys()) {
      if (this.requests.size <= MOST) break;
      this.requests.delete(id);
    }
    if (this.isPaused) this.#tell();
    else this.#draw();
  }

  // A frontend repeats rejected requests under the same id. The conductors' clocks, and thus times, vary a little.
  #isNew({ request_id: id, at_s: atS }) {
    const known = this.requests.get(id);
    return !known || Math.abs(known.at_s - atS) > 0.05;
  }

  // The state has at most 60 requests of each conductor: more within a second are counted, but not seen.
  #count(state, numNew) {
    let came = 0;
    for (const { target, incarnation, decided } of state.conductors) {
      if (decided === null) continue; // it has not answered yet
      const [before, known] = this.decided.get(target) ?? [];
      if (before === incarnation) came += decided - known;
      this.decided.set(target, [incarnation, decided]);
    }
    this.numMissed += Math.max(0, came - numNew);
    setText(this.missed, this.numMissed ? `${count(this.numMissed)} more decisions were made faster than the feed follows, which is 60 per second and conductor.` : "");
    this.missed.hidden = this.numMissed === 0;
  }

  #toggle() {
    this.isPaused = !this.isPaused;
    this.waiting.clear();
    setAttribute(this.pause, "aria-pressed", String(this.isPaused));
    this.#draw();
  }

  #draw() {
    const rows = [...this.requests.values()].reverse();
    for (const key of ["model", "tenant"]) this.#options(key, rows);
    const { model, tenant, outcome } = this.filters;
    const isWanted = (row) =>
      (!model.value || row.model === model.value) &&
      (!tenant.value || (row.tenant || "(none)") === tenant.value) &&
      (!outcome.value || (outcome.value === "placed" ? row.outcome !== "rejected" || row.prefill : row.outcome === outcome.value));
    const shown = rows.filter(isWanted).map((row) => ({ ...row, reason: row.reason ?? "" }));
    this.numShown = shown.length;
    this.#tell();
    this.table.set(shown);
  }

  #tell() {
    setText(this.pause, this.isPaused ? "Resume" : "Pause");
    const paused = this.isPaused ? `; paused, ${count(this.waiting.size)} new since` : "";
    setText(this.shown, `${count(this.numShown)} of the last ${count(this.requests.size)} requests shown${paused}`);
  }

  #options(key, rows) {
    const select = this.filters[key];
    const known = new Set([...select.options].map((option) => option.value));
    for (const value of new Set(rows.map((row) => row[key] || "(none)"))) if (!known.has(value)) select.append(h("option", { value }, value));
  }
}
