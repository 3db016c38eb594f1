// The KV pool: content, hits and evictions of each tier, and what models and tenants have of it.
import * as api from "./api.js";
import { h, measure, setText } from "./dom.js";
import { bytes, count, NONE, share } from "./format.js";
import { stateOf } from "./nodes.js";
import { DataTable, name } from "./table.js";

const EVERY_MS = 2000;
const TIERS = { memory: "memory", ssd: "SSD" };
const SOURCES = [
  ["pages", "a worker's own pages"],
  ["dram", "its pool node's memory"],
  ["ssd", "its pool node's SSD"],
  ["remote", "another pool node"],
];

function tierRows(nodes) {
  return nodes.flatMap((node) =>
    Object.entries(node.tiers).map(([tier, figures]) => {
      const evicted = Object.entries(figures.evicted_blocks);
      return { key: `${tier}/${node.id}`, node, tier, ...figures, evicted, gone: evicted.reduce((sum, [, number]) => sum + number, 0) };
    }),
  );
}

export class Pool {
  constructor() {
    this.summary = h("dl", { class: "facts" });
    this.sources = new DataTable({
      caption: "Where the KV of prompt tokens came from, since the workers' start",
      empty: "No prompt has been served yet.",
      key: (row) => row.source,
      columns: [
        { name: "source", label: "From", isHead: true, value: (row) => row.source },
        { name: "tokens", label: "Tokens", number: true, value: (row) => row.tokens, show: (row) => count(row.tokens) },
        { name: "share", label: "Of all prompt tokens", number: true, value: (row) => row.tokens / row.all, show: (row) => measure(row.tokens / row.all, share(row.tokens, row.all)) },
      ],
    });
    this.tiers = new DataTable({
      caption: "Tiers by pool node, since its start",
      empty: "No pool node has joined yet.",
      key: (row) => row.key,
      sort: "node",
      tall: true,
      paged: true,
      columns: [
        { name: "node", label: "Pool node", isHead: true, value: (row) => row.node.id, show: (row) => name(row.node.id) },
        { name: "tier", label: "Tier", value: (row) => TIERS[row.tier] ?? row.tier },
        { name: "state", label: "State", value: (row) => row.node.state, show: (row) => stateOf(row.node.state) },
        { name: "directory", label: "Directory", value: (row) => row.node.directory || NONE },
        { name: "used", label: "Used", number: true, value: (row) => row.used_bytes / row.capacity_bytes, mark: (row) => row.used_bytes, show: (row) => measure(row.used_bytes / row.capacity_bytes, `${bytes(row.used_bytes)} of ${bytes(row.capacity_bytes)}`) },
        { name: "blocks", label: "Blocks", number: true, value: (row) => row.blocks, show: (row) => count(row.blocks) },
        { name: "hits", label: "Hits", number: true, value: (row) => row.hit_blocks, mark: (row) => `${row.hit_blocks}/${row.node.asked_blocks}`, show: (row) => `${count(row.hit_blocks)} (${share(row.hit_blocks, row.node.asked_blocks)})` },
        { name: "evicted", label: "Evicted blocks", number: true, value: (row) => row.gone, show: (row) => (row.gone ? `${count(row.gone)}: ${row.evicted.map(([why, number]) => `${why} ${count(number)}`).join(", ")}` : "0") },
      ],
    });
    this.hottest = new DataTable({
      caption: "Most frequent prefixes among the remembered requests",
      empty: "No remembered request had a prefix in the pool.",
      key: (row) => row.key,
      sort: "uses",
      descending: true,
      columns: [
        { name: "key", label: "Last block", isHead: true, value: (row) => row.key, show: (row) => h("code", null, row.key) },
        { name: "blocks", label: "Length in blocks", number: true, value: (row) => row.blocks, show: (row) => count(row.blocks) },
        { name: "uses", label: "Requests", number: true, value: (row) => row.uses, show: (row) => count(row.uses) },
      ],
    });
    this.models = new DataTable({
      caption: "Blocks by model, and the prompt tokens that its workers reused since their start, from any source",
      empty: "No model has joined, and the pool is empty.",
      key: (row) => `${row.model}/${row.namespace}`,
      sort: "memory",
      descending: true,
      tall: true,
      columns: [
        { name: "model", label: "Model", isHead: true, value: (row) => row.model || "(no worker uses it)", show: (row) => name(row.model || "(no worker uses it)") },
        { name: "namespace", label: "Namespace", value: (row) => row.namespace || NONE, show: (row) => (row.namespace ? h("code", { title: row.namespace }, row.namespace.slice(0, 8)) : NONE) },
        { name: "memory", label: "In memory", number: true, value: (row) => row.dram?.bytes, show: (row) => blocksOf(row.dram) },
        { name: "ssd", label: "On SSD", number: true, value: (row) => row.ssd?.bytes, show: (row) => blocksOf(row.ssd) },
        { name: "prompts", label: "Prompt tokens", number: true, value: (row) => row.prompts?.prompt_tokens, show: (row) => count(row.prompts?.prompt_tokens) },
        { name: "reused", label: "Reused", number: true, value: (row) => row.reused, mark: (row) => `${row.reused}/${row.prompts?.prompt_tokens}`, show: (row) => (row.prompts?.prompt_tokens ? measure(row.reused / row.prompts.prompt_tokens, `${count(row.reused)} (${share(row.reused, row.prompts.prompt_tokens)})`) : NONE) },
      ],
    });
    this.tenants = new DataTable({
      caption: "Prompts that pool nodes retain for a tenant, and its use since the conductors' start",
      empty: "No tenant has used the cluster yet.",
      key: (row) => row.account,
      sort: "reused",
      descending: true,
      tall: true,
      columns: [
        { name: "tenant", label: "Tenant", isHead: true, value: (row) => row.tenant, show: (row) => name(row.tenant) },
        { name: "requests", label: "Requests now", number: true, value: (row) => row.requests, show: (row) => count(row.requests) },
        { name: "prompts", label: "Prompt tokens", number: true, value: (row) => row.reused + row.computed, show: (row) => count(row.reused + row.computed) },
        { name: "reused", label: "Reused", number: true, value: (row) => row.reused, mark: (row) => `${row.reused}/${row.computed}`, show: (row) => (row.reused + row.computed ? measure(row.reused / (row.reused + row.computed), `${count(row.reused)} (${share(row.reused, row.reused + row.computed)})`) : NONE) },
        { name: "generated", label: "Generated", number: true, value: (row) => row.generated, show: (row) => count(row.generated) },
        { name: "prefixes", label: "Retained prompts", number: true, value: (row) => row.dram?.prefixes ?? 0, show: (row) => count(row.dram?.prefixes ?? 0) },
        { name: "memory", label: "Retained in memory", number: true, value: (row) => row.dram?.bytes ?? 0, show: (row) => bytes(row.dram?.bytes ?? 0) },
        { name: "ssd", label: "On SSD", number: true, value: (row) => row.ssd?.bytes ?? 0, show: (row) => bytes(row.ssd?.bytes ?? 0) },
      ],
    });
    this.contentsNote = h("p", { class: "note wrap", hidden: true });
    this.retention = h("p", { class: "note" });
    this.contents = null;
    this.askedAt = -Infinity; // performance.now() of the last question
    this.node = h(
      "div",
      { class: "grid" },
      h("section", { class: "card" }, h("h2", null, "KV pool"), this.summary, this.tiers.node),
      h("section", { class: "card" }, h("h2", null, "By model"), this.contentsNote, this.models.node),
      h("section", { class: "card" }, h("h2", null, "By tenant"), h("p", { class: "note" }, "Blocks belong to no tenant: tenants that may share KV share its blocks. What is known by tenant is what is retained for it, and what it used."), this.retention, this.tenants.node),
      h("section", { class: "card half" }, h("h2", null, "Reused prompt tokens"), this.sources.node),
      h("section", { class: "card half" }, h("h2", null, "Hottest prefixes"), this.hottest.node),
    );
    this.facts = new Map();
    for (const label of ["Directory", "Memory", "SSD", "Requested blocks", "Leases"]) {
      const value = h("dd", null, NONE);
      this.facts.set(label, value);
      this.summary.append(h("dt", null, label), value);
    }
  }

  update(state) {
    const { nodes, prompt_tokens: all, reused_tokens: reused, directory } = state.pool;
    const rows = tierRows(nodes);
    const sum = (tier, key) => rows.filter((row) => row.tier === tier).reduce((total, row) => total + row[key], 0);
    const asked = nodes.reduce((total, node) => total + node.asked_blocks, 0);
    const found = rows.reduce((total, row) => total + row.hit_blocks, 0);
    const tell = (label, text) => setText(this.facts.get(label), text);
    tell("Directory", directory === "EXACT" ? "EXACT: the conductor's directory lists every block of the pool nodes" : directory === "DEGRADED" ? "DEGRADED: the content of some nodes is not fully known; this reduces reuse but never affects answers" : "unknown");
    tell("Memory", sum("memory", "capacity_bytes") ? `${bytes(sum("memory", "used_bytes"))} of ${bytes(sum("memory", "capacity_bytes"))} used` : NONE);
    tell("SSD", sum("ssd", "capacity_bytes") ? `${bytes(sum("ssd", "used_bytes"))} of ${bytes(sum("ssd", "capacity_bytes"))} used` : "none");
    tell("Requested blocks", `${count(asked)}: ${share(found, asked)} hits`);
    tell("Leases", count(nodes.reduce((total, node) => total + node.leases, 0)));
    this.tiers.set(rows);
    this.sources.set(all ? SOURCES.map(([key, source]) => ({ source, tokens: reused[key] ?? 0, all })) : []);
    this.hottest.set(state.hottest);
    this.#read();
    this.models.set(modelRows(this.contents?.namespaces ?? [], state.pool.models));
    this.tenants.set(tenantRows(this.contents?.retained ?? [], state.tenants));
  }

  // The pool nodes are asked only while this view is open.
  async #read() {
    if (performance.now() - this.askedAt < EVERY_MS) return;
    this.askedAt = performance.now();
    try {
      this.contents = await api.pool();
      const problems = Object.entries(this.contents.problems).map(([node, problem]) => `${node}: ${problem}`);
      this.#note(problems.length ? `Without pool nodes that do not answer: ${problems.join("; ")}` : "");
      setText(this.retention, `Since their start, pool nodes had no room for ${count(this.contents.refused)} announced prompts, and ${count(this.contents.preempted)} yielded to others.`);
    } catch (error) {
      this.#note(`The blocks by model cannot be read: ${error.message}`);
    }
  }

  #note(text) {
    setText(this.contentsNote, text);
    this.contentsNote.hidden = text === "";
  }
}

const blocksOf = (tier) => (tier ? `${count(tier.blocks)} (${bytes(tier.bytes)})` : NONE);

// A row for each namespace; the workers' counts are those of a model, and shown in the row of its first namespace.
function modelRows(namespaces, prompts) {
  const counted = new Set();
  const rows = namespaces.map((each) => {
    const isFirst = !counted.has(each.model);
    counted.add(each.model);
    return { ...each, prompts: isFirst ? prompts[each.model] : null };
  });
  const others = Object.keys(prompts).filter((model) => !counted.has(model));
  rows.push(...others.map((model) => ({ model, namespace: "", prompts: prompts[model] })));
  return rows.map((row) => ({ ...row, reused: row.prompts ? Object.values(row.prompts.reused_tokens).reduce((sum, tokens) => sum + tokens, 0) : null }));
}

// Pool nodes know accounts, conductors know whose they are; the accounts of former tenants are unknown.
function tenantRows(retained, usage) {
  const rows = new Map();
  for (const each of usage) {
    const row = rows.get(each.account) ?? { account: each.account, tenant: each.tenant || "(none)", requests: 0, computed: 0, reused: 0, generated: 0 };
    row.requests += each.requests;
    row.computed += each.computed_tokens;
    row.reused += each.reused_tokens;
    row.generated += each.generated_tokens;
    rows.set(each.account, row);
  }
  for (const each of retained) {
    const row = rows.get(each.account) ?? { account: each.account, tenant: `account ${each.account || "(none)"}`, requests: 0, computed: 0, reused: 0, generated: 0 };
    rows.set(each.account, { ...row, dram: each.dram, ssd: each.ssd });
  }
  return [...rows.values()];
}
