// The KV pool: content, hits and evictions of each tier.
import { h, measure, setText } from "./dom.js";
import { bytes, count, NONE, share } from "./format.js";
import { stateOf } from "./nodes.js";
import { DataTable, name } from "./table.js";

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
    this.node = h(
      "div",
      { class: "grid" },
      h("section", { class: "card" }, h("h2", null, "KV pool"), this.summary, this.tiers.node),
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
  }
}
