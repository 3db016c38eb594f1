// Sessions, such as an agent's runs: their turns, the reuse of each, and how long their prompts are to be retained.
import { barKey, turnBars } from "./bars.js";
import { h, measure, setText } from "./dom.js";
import { outcomeOf } from "./feed.js";
import { clock, count, duration, NONE, seconds, share } from "./format.js";
import { DataTable, name } from "./table.js";

const lastOf = (session) => session.turns[session.turns.length - 1];
const link = (id) => h("a", { href: `#/sessions/${id}`, class: "mono" }, id);
const requestLink = (id) => h("a", { href: `#/requests/${encodeURIComponent(id)}`, class: "name mono", title: id }, id);
const line = (text) => h("span", { class: "line" }, text);
const announced = (turn) => [turn.pause_s ? `pause ${duration(turn.pause_s)}` : "", turn.lifetime_s ? `lifetime ${duration(turn.lifetime_s)}` : ""].filter(Boolean).join(", ") || NONE;
const reuse = (turn) => measure(turn.reused_tokens / turn.prompt_tokens, share(turn.reused_tokens, turn.prompt_tokens));

// The retention that clients announced; pool nodes keep as much of it as the tenants' shares allow.
function retained(session, nowS) {
  const last = lastOf(session);
  if (last.outcome === "open") return "in use";
  if (!last.lifetime_s || last.ended_after_s === null) return "not announced";
  const leftS = last.at_s + last.ended_after_s + last.lifetime_s - nowS;
  return leftS > 0 ? `for ${duration(leftS)} more` : "lifetime over";
}

function pace(session, nowS) {
  const last = lastOf(session);
  if (last.outcome === "open") return "turn under way";
  const sinceS = nowS - last.at_s - (last.ended_after_s ?? 0);
  return `idle for ${duration(sinceS)}${last.pause_s ? ` (announced: ${duration(last.pause_s)})` : ""}`;
}

export class Sessions {
  constructor() {
    this.id = "";
    this.tenant = h("select", { id: "session-tenant", onchange: () => this.#draw() }, h("option", { value: "" }, "all tenants"));
    this.table = new DataTable({
      caption: "Sessions with the latest requests, of all conductors",
      empty: "No request has named a session, or none matches. Clients name it by x-session-id, session_id or prompt_cache_key.",
      key: (row) => row.session,
      sort: "used",
      descending: true,
      tall: true,
      columns: [
        { name: "session", label: "Session", isHead: true, value: (row) => row.session, show: (row) => link(row.session) },
        { name: "tenant", label: "Tenant", value: (row) => row.tenant || "(none)", show: (row) => name(row.tenant || "(none)") },
        { name: "model", label: "Model", value: (row) => lastOf(row).model, show: (row) => name(lastOf(row).model) },
        { name: "turns", label: "Turns", number: true, value: (row) => row.num_turns, show: (row) => count(row.num_turns) },
        { name: "age", label: "Age", number: true, value: (row) => Math.round(row.ageS), show: (row) => duration(row.ageS) },
        { name: "used", label: "Last turn", value: (row) => lastOf(row).at_s, mark: (row) => clock(lastOf(row).at_s), show: (row) => clock(lastOf(row).at_s) },
        { name: "pace", label: "Now", value: (row) => row.pace, show: (row) => line(row.pace) },
        { name: "prompt", label: "Prompt", number: true, value: (row) => lastOf(row).prompt_tokens, show: (row) => count(lastOf(row).prompt_tokens) },
        { name: "reuse", label: "Reused", number: true, value: (row) => lastOf(row).reused_tokens / lastOf(row).prompt_tokens, show: (row) => reuse(lastOf(row)) },
        { name: "retained", label: "To be retained", value: (row) => row.retained, show: (row) => line(row.retained) },
        { name: "parent", label: "Started by", value: (row) => row.parent || NONE, show: (row) => (row.parent ? link(row.parent) : NONE) },
      ],
    });
    this.turns = new DataTable({
      caption: "Its latest turns; reused as planned until a turn has finished",
      empty: "This session is not among those with the latest requests.",
      key: (row) => row.request_id,
      sort: "at",
      descending: true,
      columns: [
        { name: "at", label: "At", value: (row) => row.at_s, mark: (row) => clock(row.at_s), show: (row) => clock(row.at_s) },
        { name: "request", label: "Request", isHead: true, value: (row) => row.request_id, show: (row) => requestLink(row.request_id) },
        { name: "outcome", label: "Outcome", value: (row) => `${row.outcome} ${row.reason}`, show: (row) => outcomeOf({ ...row, isFollowed: true }) },
        { name: "prefill", label: "Prefill", value: (row) => row.prefill || NONE, show: (row) => (row.prefill ? name(row.prefill) : NONE) },
        { name: "prompt", label: "Prompt", number: true, value: (row) => row.prompt_tokens, show: (row) => count(row.prompt_tokens) },
        { name: "reused", label: "Reused", number: true, value: (row) => row.reused_tokens, show: (row) => `${count(row.reused_tokens)} (${share(row.reused_tokens, row.prompt_tokens)})` },
        { name: "generated", label: "Generated", number: true, value: (row) => row.generated, show: (row) => count(row.generated) },
        { name: "ttft", label: "TTFT", number: true, value: (row) => row.ttft_s, show: (row) => seconds(row.ttft_s) },
        { name: "hints", label: "Announced", value: announced, show: (row) => line(announced(row)) },
      ],
    });
    this.title = h("h2", null, "Turns");
    this.facts = h("p", { class: "note" });
    this.picture = h("div", { class: "picture" });
    this.detail = h("section", { class: "card", hidden: true }, this.title, this.facts, this.picture, barKey([["move", "prompt, reused"], ["work", "prompt, computed"], ["tokens", "generated"]]), this.turns.node);
    this.node = h(
      "div",
      { class: "grid" },
      this.detail,
      h(
        "section",
        { class: "card" },
        h("h2", null, "Sessions"),
        h("p", { class: "note" }, "Session ids are hashes of the tenant and the client's id, which the cluster does not know. To be retained: as the client announced; what pool nodes retain, by tenant, is shown under ", h("a", { href: "#/pool" }, "KV pool"), "."),
        h("div", { class: "form" }, h("label", { for: "session-tenant" }, "Tenant", this.tenant)),
        this.table.node,
      ),
    );
  }

  open(id) {
    this.id = id;
    if (this.state) this.#draw();
  }

  update(state) {
    this.state = state;
    const known = new Set([...this.tenant.options].map((option) => option.value));
    for (const value of new Set(state.sessions.map((session) => session.tenant || "(none)"))) if (!known.has(value)) this.tenant.append(h("option", { value }, value));
    this.#draw();
  }

  #draw() {
    const nowS = this.state.now_s;
    const rows = this.state.sessions.map((session) => ({ ...session, ageS: nowS - session.first_at_s, pace: pace(session, nowS), retained: retained(session, nowS) }));
    this.table.set(rows.filter((row) => !this.tenant.value || (row.tenant || "(none)") === this.tenant.value));
    this.#turns(rows.find((row) => row.session === this.id), rows);
  }

  #turns(session, rows) {
    this.detail.hidden = this.id === "";
    if (this.id === "") return;
    setText(this.title, `Turns of session ${this.id}`);
    this.turns.set(session?.turns ?? []);
    const children = rows.filter((row) => row.parent === this.id).length;
    setText(this.facts, session ? `${count(session.num_turns)} turns in ${duration(session.ageS)}; ${session.pace}${children ? `; it started ${count(children)} of the sessions below` : ""}.` : "");
    const drawn = JSON.stringify(session?.turns ?? null);
    if (this.drawn === drawn) return;
    this.drawn = drawn;
    this.picture.replaceChildren(...(session ? [turnBars(session.turns)] : []));
  }
}
