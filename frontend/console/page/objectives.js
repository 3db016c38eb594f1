// The objectives in force, their attainment, and changes to them: first a preview, then a new version.
import * as api from "./api.js";
import { h, say, setText } from "./dom.js";
import { confirm } from "./dialogs.js";
import { count, day, NONE } from "./format.js";
import { attainment, attainmentTable } from "./overview.js";
import { showPreview } from "./preview.js";
import { DataTable, name } from "./table.js";

const FROM = { tenant: "tenant", class: "class", model: "model", cluster: "cluster", none: NONE };
const KINDS = ["ttft", "tbt"];
const LABELS = { ttft: "TTFT", tbt: "TBT" };

export class Objectives {
  constructor(session) {
    this.session = session;
    this.base = null; // the version that is being edited
    this.inputs = [];
    this.facts = h("dl", { class: "facts" });
    this.warnings = h("ul", { class: "notes" });
    this.inForce = new DataTable({
      caption: "Objectives of requests without headers and without tenant objectives",
      empty: "No model is served yet.",
      key: (row) => JSON.stringify([row.model, row.slo_class]),
      sort: "model",
      columns: [
        { name: "model", label: "Model", isHead: true, value: (row) => row.model, show: (row) => name(row.model) },
        { name: "class", label: "Class", value: (row) => row.slo_class || "(none)", mark: (row) => `${row.slo_class}${row.is_default}`, show: (row) => `${row.slo_class || "(none)"}${row.is_default && row.slo_class ? " · default" : ""}` },
        { name: "ttft", label: "TTFT", number: true, value: (row) => row.ttft },
        { name: "ttft_from", label: "set by", value: (row) => FROM[row.ttft_from] ?? row.ttft_from },
        { name: "tbt", label: "TBT", number: true, value: (row) => row.tbt },
        { name: "tbt_from", label: "set by", value: (row) => FROM[row.tbt_from] ?? row.tbt_from },
      ],
    });
    this.attained = attainmentTable();
    this.locked = h("p", { class: "note" }, "To preview or make a change, enter an admin key (top right).");
    this.start = h("button", { type: "button", onclick: () => this.#edit() }, "Change objectives…");
    this.editor = h("div");
    this.node = h(
      "div",
      { class: "grid" },
      h("section", { class: "card half" }, h("h2", null, "In force"), this.facts, this.warnings, this.inForce.node),
      h("section", { class: "card half" }, h("h2", null, "Met"), this.attained.node),
      h("section", { class: "card" }, h("h2", null, "Change"), this.locked, this.start, this.editor),
    );
  }

  update(state) {
    this.state = state;
    const slo = state.slo ?? {};
    const rows = [
      ["Version", slo.version ? `${slo.version}, since ${day(slo.at_s)}` : "as configured"],
      ["Author", slo.author || NONE],
      ["Reason", slo.reason || NONE],
      ["Stored in", slo.kept || NONE],
    ];
    if (this.facts.children.length === 0) this.facts.append(...rows.flatMap(([label]) => [h("dt", null, label), h("dd")]));
    rows.forEach(([, text], index) => setText(this.facts.children[2 * index + 1], text));
    const warnings = [
      ...(slo.trouble ? [`The objectives cannot be changed now: ${slo.trouble}`] : []),
      ...(slo.unmeetable ?? []).map((text) => `Cannot be met: ${text}`),
      ...(slo.drift ?? []).map((text) => `Differs from the configuration (in force → configured): ${text}`),
    ];
    if (this.warnings.dataset.told !== warnings.join("\n")) {
      this.warnings.dataset.told = warnings.join("\n");
      this.warnings.replaceChildren(...warnings.map((text) => h("li", null, text)));
    }
    this.inForce.set(state.objectives);
    this.attained.set(attainment(state));
    const mayAct = api.hasKey();
    this.locked.hidden = mayAct;
    this.start.hidden = !mayAct || this.base !== null;
    if (!mayAct && this.base) this.#close();
  }

  async #edit() {
    this.start.disabled = true;
    try {
      const told = await api.objectives();
      this.base = told.current;
      this.#build();
      this.start.hidden = true;
      this.inputs[0]?.input.focus();
    } catch (error) {
      this.editor.replaceChildren(h("p", { class: "outcome bad", role: "alert" }, `The objectives cannot be read: ${error.message}`));
    } finally {
      this.start.disabled = false;
    }
  }

  #close() {
    this.base = null;
    this.inputs = [];
    this.editor.replaceChildren();
    this.start.hidden = !api.hasKey();
  }

  // Cluster, then the models that are served or have objectives, then the classes. Other parts of the record stay unchanged.
  #build() {
    const content = this.base.content;
    const models = [...new Set([...this.state.objectives.map((row) => row.model), ...Object.keys(content.models ?? {})])].sort();
    this.inputs = [];
    this.rows = h("tbody");
    this.#addScope("Cluster", [], "cluster");
    for (const model of models) this.#addScope("Model", ["models", model], model);
    for (const sloClass of Object.keys(content.classes ?? {}).sort()) this.#addScope("Class", ["classes", sloClass], sloClass);
    const fresh = h("input", { id: "new-class", class: "short", autocomplete: "off", pattern: "[A-Za-z0-9_.\\-]{1,64}" });
    const add = () => {
      const text = fresh.value.trim();
      if (!text || !fresh.checkValidity() || this.inputs.some((each) => each.path[0] === "classes" && each.path[1] === text)) return fresh.focus();
      this.#addScope("Class", ["classes", text], text);
      fresh.value = "";
      this.inputs.at(-2).input.focus();
    };
    this.reason = h("input", { id: "slo-reason", maxlength: 300, autocomplete: "off" });
    this.outcome = h("div", { role: "status" });
    const tenants = Object.keys(content.tenants ?? {}).length;
    this.editor.replaceChildren(
      h("p", { class: "note" }, `Changes apply to version ${this.base.version}. Enter a time such as 2s or 300ms, a multiple of the time on an idle cluster such as 5x, "5x p95" for another percentile, or off. An empty field inherits from the next scope (class, then model, then cluster).`),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Objectives to change" }, h("table", null, h("caption", null, h("span", null, "New objectives")), h("thead", null, h("tr", null, ...["Scope", "Name", "Time to first token", "Time between tokens"].map((label) => h("th", { scope: "col" }, label)))), this.rows)),
      tenants ? h("p", { class: "note" }, `The objectives of ${count(tenants)} tenant(s) are not changed here; use moonpool slo set.`) : h("span"),
      h("div", { class: "form" }, h("label", { for: "new-class" }, "New class", fresh), h("button", { type: "button", onclick: add }, "Add")),
      h("div", { class: "form" }, h("label", { class: "wide", for: "slo-reason" }, "Reason, stored with the version", this.reason)),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", onclick: (event) => this.#preview(event.currentTarget) }, "Preview"),
        h("button", { type: "button", class: "main", onclick: (event) => this.#change(event.currentTarget) }, "Change…"),
        h("button", { type: "button", onclick: () => (this.#close(), this.start.focus()) }, "Cancel"),
      ),
      this.outcome,
    );
  }

  #addScope(kind, path, label) {
    const now = path.length ? (this.base.content[path[0]]?.[path[1]] ?? {}) : (this.base.content.cluster ?? {});
    const cells = KINDS.map((key) => {
      const input = h("input", { class: "short", value: now[key] ?? "", autocomplete: "off", spellcheck: "false", "aria-label": `${LABELS[key]} of ${kind.toLowerCase()} ${label}` });
      this.inputs.push({ path: path.length ? path : ["cluster"], key, input });
      return h("td", null, input);
    });
    this.rows.append(h("tr", null, h("th", { scope: "row" }, kind), h("td", null, path.length ? name(label) : NONE), ...cells));
  }

  #wanted() {
    const content = structuredClone(this.base.content);
    for (const { path, key, input } of this.inputs) {
      const text = input.value.trim();
      const [part, scope] = path;
      if (scope === undefined) {
        content[part] ??= {};
        if (text) content[part][key] = text;
        else delete content[part][key];
        continue;
      }
      content[part] ??= {};
      if (text || part === "classes" || Object.hasOwn(content[part], scope)) {
        const old = Object.hasOwn(content[part], scope) ? content[part][scope] : {};
        const next = { ...old };
        if (text) next[key] = text;
        else delete next[key];
        // A name such as __proto__ must be treated like any other.
        Object.defineProperty(content[part], scope, { value: next, enumerable: true, configurable: true, writable: true });
      }
    }
    return content;
  }

  async #preview(button) {
    button.disabled = true;
    setText(this.outcome, "Asking the conductor…");
    try {
      const told = await api.changeObjectives({ content: this.#wanted(), trial: true, expect_version: this.base.version });
      this.outcome.replaceChildren(showPreview(told));
      say("The preview is ready.");
    } catch (error) {
      this.#refused(error);
    } finally {
      button.disabled = false;
    }
  }

  async #change(button) {
    const reason = this.reason.value.trim();
    if (!reason) {
      this.outcome.replaceChildren(h("p", { class: "outcome warn" }, "A reason is required: it is stored with the version for audits."));
      return this.reason.focus();
    }
    button.disabled = true;
    try {
      const change = { content: this.#wanted(), expect_version: this.base.version };
      const trial = await api.changeObjectives({ ...change, trial: true });
      if (!trial.differences.length) {
        this.outcome.replaceChildren(h("p", { class: "outcome" }, "Nothing would change."));
        return;
      }
      this.outcome.replaceChildren(showPreview(trial));
      const done = await confirm({
        title: `Create version ${this.base.version + 1} of the objectives?`,
        consequence: "It applies to new requests immediately, at all conductors within seconds. Admitted requests keep their objectives. To revert, create another version with moonpool slo rollback.",
        details: [...trial.differences, ...trial.warnings.map((text) => `Warning: ${text}`)],
        verb: "Change them",
        act: () => api.changeObjectives({ ...change, reason, trial: false }),
      });
      if (done) {
        this.#close();
        const text = done.differences.length ? `Version ${done.version.version} is in force.` : "Nothing changed.";
        this.editor.replaceChildren(h("p", { class: "outcome good", role: "status" }, text));
        say(text);
        this.start.focus();
        this.session.refresh();
      }
    } catch (error) {
      this.#refused(error);
    } finally {
      button.disabled = false;
    }
  }

  #refused(error) {
    const hint = error.status === 409 ? " Cancel and start again from the version now in force." : "";
    this.outcome.replaceChildren(h("p", { class: "outcome bad", role: "alert" }, `Refused: ${error.message}${hint}`));
  }
}
