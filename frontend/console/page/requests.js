// Recent requests, and the path of one of them.
import { h, setText } from "./dom.js";
import { clock, count, NONE, seconds } from "./format.js";
import { DataTable, name } from "./table.js";
import { Path } from "./path.js";

const KINDS = { finished: "good", rejected: "bad", failed: "bad", cancelled: "warn", open: "" };
const SIGNS = { finished: "✓", rejected: "✕", failed: "✕", cancelled: "–", open: "…" };

const outcomeOf = (request) =>
  h("span", { class: `state ${KINDS[request.outcome] ?? ""}` }, `${SIGNS[request.outcome] ?? "?"} ${request.outcome === "open" ? "under way" : request.outcome}${request.reason ? `: ${request.reason}` : ""}`);

// Predicted and measured.
const both = (predicted, actual) => `${predicted ? seconds(predicted) : NONE} → ${actual === null || actual === undefined ? NONE : seconds(actual)}`;

export class Requests {
  constructor() {
    this.outcome = h("select", { id: "request-outcome", onchange: () => this.#draw() }, ...["", "open", "finished", "rejected", "failed", "cancelled"].map((value) => h("option", { value }, value === "" ? "all outcomes" : value === "open" ? "under way" : value)));
    this.id = h("input", { id: "request-id", class: "mono", placeholder: "cmpl-…", autocomplete: "off", spellcheck: "false" });
    this.path = new Path();
    this.table = new DataTable({
      caption: "Recent requests evaluated by the conductors; predicted → measured",
      empty: "No request has been evaluated yet, or none matches.",
      key: (row) => `${row.request_id}`,
      sort: "at",
      descending: true,
      tall: true,
      columns: [
        { name: "at", label: "At", value: (row) => Math.round(row.at_s), show: (row) => clock(row.at_s) },
        { name: "id", label: "Request", isHead: true, value: (row) => row.request_id, show: (row) => h("a", { href: `#/requests/${encodeURIComponent(row.request_id)}`, class: "name mono", title: row.request_id }, row.request_id) },
        { name: "model", label: "Model", value: (row) => row.model, show: (row) => name(row.model) },
        { name: "class", label: "Class", value: (row) => row.slo_class || "(none)", show: (row) => name(row.slo_class || "(none)") },
        { name: "outcome", label: "Outcome", value: (row) => `${row.outcome} ${row.reason}`, show: outcomeOf },
        { name: "prompt", label: "Prompt", number: true, value: (row) => row.prompt_tokens, show: (row) => count(row.prompt_tokens) },
        { name: "ttft", label: "TTFT", number: true, value: (row) => row.ttft_s ?? row.predicted_ttft_s, mark: (row) => both(row.predicted_ttft_s, row.ttft_s), show: (row) => both(row.predicted_ttft_s, row.ttft_s) },
        { name: "tbt", label: "TBT", number: true, value: (row) => row.tbt_s ?? row.predicted_tbt_s, mark: (row) => both(row.predicted_tbt_s, row.tbt_s), show: (row) => both(row.predicted_tbt_s, row.tbt_s) },
        { name: "prefill", label: "Prefill", value: (row) => row.prefill || NONE, show: (row) => (row.prefill ? name(row.prefill) : NONE) },
        { name: "decode", label: "Decode", value: (row) => row.decode || (row.prefill ? "same node" : NONE), show: (row) => (row.decode ? name(row.decode) : row.prefill ? "same node" : NONE) },
      ],
    });
    this.shown = h("p", { class: "note" });
    this.node = h(
      "div",
      { class: "grid" },
      h(
        "section",
        { class: "card" },
        h("h2", null, "Path of a request"),
        h(
          "form",
          {
            class: "form",
            onsubmit: (event) => {
              event.preventDefault();
              const id = this.id.value.trim();
              if (!id) return;
              location.hash = `#/requests/${encodeURIComponent(id)}`;
              this.path.load(id);
            },
          },
          h("label", { class: "wide", for: "request-id" }, "Request id: the response's id, or its header x-moonpool-request-id", this.id),
          h("button", { type: "submit", class: "main" }, "Show path"),
        ),
        this.path.node,
      ),
      h("section", { class: "card" }, h("h2", null, "Recent requests"), h("div", { class: "form" }, h("label", { for: "request-outcome" }, "Outcome", this.outcome)), this.shown, this.table.node),
    );
    this.requests = [];
  }

  open(id) {
    if (!id || id === this.path.id) return;
    this.id.value = id;
    this.path.load(id);
  }

  update(state) {
    this.requests = state.requests;
    this.#draw();
    this.path.tick();
  }

  #draw() {
    const shown = this.requests.filter((row) => !this.outcome.value || row.outcome === this.outcome.value);
    setText(this.shown, `${count(shown.length)} of the last ${count(this.requests.length)} shown`);
    this.table.set(shown);
  }
}
