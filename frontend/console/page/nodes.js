// All nodes, and the actions that an admin may perform on one.
import * as api from "./api.js";
import { h, measure, say, setText } from "./dom.js";
import { confirm } from "./dialogs.js";
import { count, NONE, seconds, share } from "./format.js";
import { DataTable, name } from "./table.js";

const SIGNS = { ready: "✓", draining: "↓", suspect: "✕", switching: "⇄", unknown: "?" };
const KINDS = { ready: "good", draining: "warn", suspect: "bad", switching: "warn" };
const OTHER = { prefill: "decode", decode: "prefill" };

export const stateOf = (state) => h("span", { class: `state ${KINDS[state] ?? ""}` }, `${SIGNS[state] ?? "?"} ${state}`);

function kv(node) {
  if (!node.capacity_tokens) return NONE;
  const free = node.free_tokens / node.capacity_tokens;
  return measure(free, `${count(node.free_tokens)} of ${count(node.capacity_tokens)}`, free < 0.05);
}

export class Nodes {
  constructor(session) {
    this.session = session;
    this.filter = h("input", { id: "node-filter", type: "search", placeholder: "id, model, host…", autocomplete: "off", oninput: () => this.#draw() });
    this.role = h("select", { id: "node-role", onchange: () => this.#draw() }, ...["", "prefill", "decode", "aggregated", "pool"].map((role) => h("option", { value: role }, role || "all roles")));
    this.state = h("select", { id: "node-state", onchange: () => this.#draw() }, ...["", "ready", "draining", "switching", "suspect"].map((state) => h("option", { value: state }, state || "all states")));
    this.shown = h("p", { class: "note", role: "status" });
    this.outcome = h("p", { class: "outcome", role: "status", hidden: true });
    this.locked = h("p", { class: "note" }, "To drain a node or switch its role, enter an admin key (top right).");
    this.table = new DataTable({
      caption: "Nodes that have joined the cluster",
      empty: "No node matches.",
      key: (node) => node.id,
      sort: "id",
      tall: true,
      paged: true,
      columns: [
        { name: "id", label: "Node", isHead: true, value: (node) => node.id, show: (node) => name(node.id) },
        { name: "role", label: "Role", value: (node) => node.role },
        { name: "model", label: "Model", value: (node) => node.model || NONE, show: (node) => (node.model ? name(node.model) : NONE) },
        { name: "state", label: "State", value: (node) => node.state, show: (node) => stateOf(node.state) },
        { name: "running", label: "Running", number: true, value: (node) => (node.role === "pool" ? null : node.running), show: (node) => (node.role === "pool" ? NONE : count(node.running)) },
        { name: "waiting", label: "Waiting", number: true, value: (node) => (node.role === "pool" ? null : node.waiting), show: (node) => (node.role === "pool" ? NONE : count(node.waiting)) },
        { name: "queue", label: "Queue", number: true, value: (node) => (node.queue_s === null ? null : Number(node.queue_s.toPrecision(3))), show: (node) => seconds(node.queue_s) },
        { name: "kv", label: "KV tokens free", number: true, value: (node) => (node.capacity_tokens ? node.free_tokens : null), show: kv, mark: (node) => `${node.free_tokens}/${node.capacity_tokens}` },
        { name: "committed", label: "Committed", number: true, value: (node) => node.committed_tokens, show: (node) => (node.capacity_tokens && node.committed_tokens !== null ? share(node.committed_tokens, node.capacity_tokens) : NONE) },
        { name: "host", label: "Host", value: (node) => node.host || NONE, show: (node) => (node.host ? name(node.host) : NONE) },
        { name: "engine", label: "Engine", value: (node) => node.engine || (node.role === "pool" ? NONE : "computes"), show: (node) => (node.engine ? name(node.engine) : node.role === "pool" ? NONE : "computes") },
        { name: "act", label: "Actions", value: () => null, mark: (node) => `${node.role}/${node.state}`, show: (node) => this.#buttons(node) },
      ],
    });
    this.node = h(
      "section",
      { class: "card" },
      h("h2", null, "Nodes"),
      h(
        "div",
        { class: "form" },
        h("label", { class: "wide", for: "node-filter" }, "Filter", this.filter),
        h("label", { for: "node-role" }, "Role", this.role),
        h("label", { for: "node-state" }, "State", this.state),
      ),
      this.locked,
      this.outcome,
      this.shown,
      this.table.node,
    );
    this.nodes = [];
  }

  update(state) {
    this.nodes = state.nodes;
    this.table.show("act", api.hasKey());
    this.locked.hidden = api.hasKey();
    this.#draw();
  }

  #draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = this.nodes.filter(
      (node) =>
        (!this.role.value || node.role === this.role.value) &&
        (!this.state.value || node.state === this.state.value) &&
        (!wanted || [node.id, node.model, node.host, node.engine, node.target].some((text) => text.toLowerCase().includes(wanted))),
    );
    setText(this.shown, shown.length === this.nodes.length ? `${count(this.nodes.length)} nodes` : `${count(shown.length)} of ${count(this.nodes.length)} nodes`);
    setText(this.table.empty, this.nodes.length ? "No node matches." : "No node has joined yet. Workers and pool nodes appear here as they join the conductor.");
    this.table.set(shown);
  }

  #buttons(node) {
    const other = OTHER[node.role];
    const isGoing = node.state === "draining";
    return h(
      "div",
      { class: "actions" },
      h("button", { type: "button", class: "small", disabled: isGoing, "aria-label": `Drain ${node.id}`, onclick: () => this.#drain(node) }, "Drain…"),
      other
        ? h("button", { type: "button", class: "small", disabled: isGoing || node.state === "switching", "aria-label": `Make ${node.id} a ${other} node`, onclick: () => this.#switch(node, other) }, `To ${other}…`)
        : null,
    );
  }

  async #drain(made) {
    const node = this.nodes.find((each) => each.id === made.id) ?? made; // the button may belong to older data
    const peers = this.nodes.filter((each) => each.id !== node.id && each.role === node.role && each.model === node.model && each.state === "ready");
    const done = await confirm({
      title: `Drain ${node.id}?`,
      consequence: [
        `It accepts no new work, finishes or hands over its requests (${count(node.running)} running, ${count(node.waiting)} waiting), and leaves. moonpool serve does not restart it unless autoscaling is on; Kubernetes starts a replacement.`,
        peers.length || node.role === "pool"
          ? `${count(peers.length)} other ready ${node.role} ${peers.length === 1 ? "node stays" : "nodes stay"}${node.model ? ` for ${node.model}` : ""}.`
          : `It is the last ready ${node.role} node of ${node.model}: its requests can no longer be served.`,
        ...(node.role === "pool" ? ["Its KV is lost; other pool nodes are not affected. A pool node in use by workers cannot be drained: drain the workers first."] : []),
      ],
      verb: "Drain",
      grave: true,
      act: () => api.drain(node.id),
    });
    if (done) this.#tell(`${node.id} is draining. Its state shows the progress.`);
  }

  async #switch(node, role) {
    const done = await confirm({
      title: `Switch ${node.id} to ${role}?`,
      consequence: [
        `It accepts no new work, finishes its ${node.role} work, then continues as a ${role} node in the same process. Long answers continue beside its new work.`,
        "If it does not finish within its drain grace period, it keeps its role. The last node of a role cannot be switched.",
      ],
      verb: `Switch to ${role}`,
      act: () => api.switchRole(node.id, role),
    });
    if (done) this.#tell(`${node.id} is switching to ${role}.`);
  }

  #tell(text) {
    setText(this.outcome, text);
    this.outcome.hidden = false;
    say(text);
    this.session.refresh();
  }
}
