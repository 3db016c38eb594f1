// Overview of the cluster: figures and small charts of the last 15 minutes.
import { h, measure, setText } from "./dom.js";
import { count, isNumber, NONE, rate, seconds, share } from "./format.js";
import { Chart } from "./chart.js";
import { DataTable, ending, name } from "./table.js";
import { slicesOf } from "./slices.js";

const REASONS = {
  ttft: "time to first token would be too long",
  tbt: "time between tokens would be too long",
  decode_capacity: "no decode node has room",
  queue: "the queue is too long",
  no_nodes: "no node can serve it",
  unknown_model: "the model is not served",
  unknown_class: "the class is not defined in the objectives",
  denied_class: "the tenant may not use the class",
  too_long: "prompt and answer are too long",
  endless: "too many endless requests of its tenant",
  after_prefill: "decode load was too high after its prefill",
};
const OBJECTIVES = { ttft: "TTFT", tbt: "TBT", all: "all objectives" };
export const reasonOf = (reason) => REASONS[reason] ?? reason;

class Tile {
  constructor(title, format) {
    this.value = h("div", { class: "value" }, NONE);
    this.aside = h("div", { class: "aside" });
    this.chart = new Chart(title, format);
    this.node = h("div", { class: "tile" }, h("h3", null, title), this.value, this.aside, this.chart.node);
  }
  show(value, aside, first, second) {
    setText(this.value, value);
    setText(this.aside, aside);
    this.chart.draw(first, second);
  }
}

// Objectives and how often they were met: [{model, slo_class, objective, met, missed, rejected, failed}].
export function attainment(state) {
  const rows = new Map();
  for (const [model, all] of Object.entries(state.window)) {
    if (model === "") continue;
    for (const [sloClass, objective, result, number] of all.attained) {
      const key = JSON.stringify([model, sloClass, objective]);
      const row = rows.get(key) ?? { key, model, sloClass, objective, met: 0, missed: 0, rejected: 0, failed: 0 };
      row[result] += number;
      rows.set(key, row);
    }
  }
  return [...rows.values()].map((row) => ({ ...row, all: row.met + row.missed + row.rejected + row.failed }));
}

export function attainmentTable() {
  return new DataTable({
    caption: "Attainment of objectives in the last 15 minutes, over requests with an objective",
    empty: "No request with an objective ended in the last 15 minutes.",
    key: (row) => row.key,
    sort: "model",
    columns: [
      { name: "model", label: "Model", isHead: true, value: (row) => row.model, show: (row) => name(row.model) },
      { name: "class", label: "Class", value: (row) => row.sloClass || "(none)", show: (row) => name(row.sloClass || "(none)") },
      { name: "objective", label: "Objective", value: (row) => OBJECTIVES[row.objective] ?? row.objective },
      {
        name: "met", label: "Met", number: true, value: (row) => (row.all ? row.met / row.all : null),
        mark: (row) => `${row.met}/${row.all}`,
        show: (row) => measure(row.met / row.all, share(row.met, row.all), row.met / row.all < 0.9),
      },
      { name: "missed", label: "Missed", number: true, value: (row) => row.missed, show: (row) => count(row.missed) },
      { name: "rejected", label: "Rejected", number: true, value: (row) => row.rejected, show: (row) => count(row.rejected) },
      { name: "failed", label: "Failed", number: true, value: (row) => row.failed, show: (row) => count(row.failed) },
      { name: "all", label: "Requests", number: true, value: (row) => row.all, show: (row) => count(row.all) },
    ],
  });
}

export class Overview {
  constructor() {
    this.tiles = {
      requests: new Tile("Requests per second", rate),
      ttft: new Tile("Time to first token", seconds),
      tbt: new Tile("Time between tokens", seconds),
      rejected: new Tile("Rejected per second", rate),
      tokens: new Tile("Tokens per second", rate),
      cached: new Tile("Prompt tokens from cache", (value) => share(value, 1)),
    };
    this.model = h("select", { id: "overview-model", onchange: () => this.state && this.update(this.state) }, h("option", { value: "" }, "all models"));
    this.chooser = h("div", { class: "form" }, h("label", { for: "overview-model" }, "Model", this.model));
    this.attained = attainmentTable();
    this.reasons = new DataTable({
      caption: "Requests rejected in the last 15 minutes",
      empty: "No request was rejected in the last 15 minutes.",
      key: (row) => row.reason,
      sort: "number",
      descending: true,
      columns: [
        { name: "reason", label: "Reason", isHead: true, value: (row) => row.reason, show: (row) => h("code", null, row.reason) },
        { name: "means", label: "Meaning", value: (row) => reasonOf(row.reason) },
        { name: "number", label: "Requests", number: true, value: (row) => row.number, show: (row) => count(row.number) },
      ],
    });
    this.conductors = new DataTable({
      caption: "Conductors, and which one this frontend uses",
      empty: "No conductor is configured.",
      key: (row) => row.target,
      columns: [
        { name: "target", label: "Conductor", isHead: true, value: (row) => row.target, show: (row) => ending(row.target) },
        {
          name: "state", label: "State", value: (row) => (row.problem ? "away" : row.is_asked ? "answers, in use" : "answers"),
          show: (row) => h("span", { class: `state ${row.problem ? "bad" : "good"}`, title: row.problem || null }, row.problem ? "✕ away" : row.is_asked ? "✓ answers · in use" : "✓ answers"),
        },
        { name: "admission", label: "Admission", value: (row) => (row.admission ? `${row.admission}, ${row.mode}` : NONE) },
        { name: "version", label: "Objectives", number: true, value: (row) => row.slo_version, show: (row) => (isNumber(row.slo_version) ? `version ${row.slo_version}` : NONE) },
        { name: "log", label: "Decision log", value: (row) => (row.has_decision_log ? "kept" : "none") },
      ],
    });
    this.roles = new DataTable({
      caption: "Nodes by role",
      empty: "No node has joined yet.",
      key: (row) => row.role,
      sort: "role",
      columns: [
        { name: "role", label: "Role", isHead: true, value: (row) => row.role },
        { name: "nodes", label: "Nodes", number: true, value: (row) => row.nodes, show: (row) => count(row.nodes) },
        { name: "well", label: "Ready", number: true, value: (row) => row.ready, show: (row) => count(row.ready) },
        { name: "running", label: "Running", number: true, value: (row) => row.running, show: (row) => count(row.running) },
        { name: "waiting", label: "Waiting", number: true, value: (row) => row.waiting, show: (row) => count(row.waiting) },
        {
          name: "free", label: "KV tokens free", number: true, value: (row) => row.free,
          show: (row) => (row.capacity ? `${count(row.free)} (${share(row.free, row.capacity)})` : NONE),
        },
      ],
    });
    this.node = h(
      "div",
      { class: "grid" },
      h("h2", { class: "hidden-text" }, "Overview"),
      h("div", { class: "tiles" }, ...Object.values(this.tiles).map((tile) => tile.node)),
      h("p", { class: "note legend" }, "Charts show the last 15 minutes, up to now. In charts of durations, the solid line is the median and the dashed line the 95th percentile."),
      h("section", { class: "card two-thirds" }, h("h2", null, "Objectives met"), this.chooser, this.attained.node),
      h("section", { class: "card third" }, h("h2", null, "Rejections"), this.reasons.node),
      h("section", { class: "card half" }, h("h2", null, "Nodes"), this.roles.node),
      h("section", { class: "card half" }, h("h2", null, "Conductors"), this.conductors.node),
    );
  }

  update(state) {
    this.state = state;
    this.#models(Object.keys(state.window).filter((model) => model !== ""));
    const model = this.model.value;
    const all = state.window[model] ?? {};
    const slices = slicesOf(state, model);
    const lastMinute = slices.slice(-7, -1);
    const each = (pick) => slices.map((slice) => (slice ? pick(slice) : 0));
    const times = (pick) => slices.map((slice) => (slice ? pick(slice) : null));
    const perSecond = (key) => lastMinute.reduce((sum, slice) => sum + (slice?.[key] ?? 0), 0) / (lastMinute.length * state.slice_s);
    const { requests, ttft, tbt, rejected, tokens, cached } = this.tiles;
    requests.show(rate(perSecond("arrived")), `${count(all.arrived ?? 0)} in 15 min, ${count(state.front_door.in_flight)} in flight here`, each((s) => s.arrived / state.slice_s));
    ttft.show(seconds(all.ttft?.[0]), `95th percentile ${seconds(all.ttft?.[1])}`, times((s) => s.ttft[0]), times((s) => s.ttft[1]));
    tbt.show(seconds(all.tbt?.[0]), `95th percentile ${seconds(all.tbt?.[1])}`, times((s) => s.tbt[0]), times((s) => s.tbt[1]));
    rejected.show(rate(perSecond("rejected")), `${count(all.rejected ?? 0)} in 15 min: ${share(all.rejected ?? 0, all.arrived ?? 0)}`, each((s) => s.rejected / state.slice_s));
    tokens.show(rate(perSecond("generated")), "of requests that ended", each((s) => s.generated / state.slice_s));
    cached.show(share(all.cached_tokens ?? 0, all.prompt_tokens ?? 0), `${count(all.cached_tokens ?? 0)} of ${count(all.prompt_tokens ?? 0)} tokens`, times((s) => (s.prompt_tokens ? s.cached_tokens / s.prompt_tokens : null)));
    this.attained.set(attainment(state).filter((row) => !model || row.model === model));
    this.reasons.set(Object.entries(all.reasons ?? {}).map(([reason, number]) => ({ reason, number })));
    this.conductors.set(state.conductors);
    this.roles.set(byRole(state.nodes));
  }

  #models(models) {
    const known = [...this.model.options].map((option) => option.value);
    for (const model of models) if (!known.includes(model)) this.model.append(h("option", { value: model }, model));
    this.chooser.hidden = models.length < 2;
  }
}

function byRole(nodes) {
  const rows = new Map();
  for (const node of nodes) {
    const row = rows.get(node.role) ?? { role: node.role, nodes: 0, ready: 0, running: 0, waiting: 0, free: 0, capacity: 0 };
    row.nodes += 1;
    row.ready += node.state === "ready";
    row.running += node.running;
    row.waiting += node.waiting;
    row.free += node.free_tokens;
    row.capacity += node.capacity_tokens;
    rows.set(node.role, row);
  }
  return [...rows.values()];
}

