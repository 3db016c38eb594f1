// Counterfactual effect of other objectives on recent requests, and its limits.
import { h } from "./dom.js";
import { count, duration, share } from "./format.js";
import { name } from "./table.js";

const HEADINGS = ["Model", "Class", "Requests", "Admitted", "Newly rejected", "Newly admitted", "Met objectives"];

export function showPreview(told) {
  const { differences, warnings, notes, preview } = told;
  return h(
    "div",
    null,
    h("h3", null, `Against version ${told.version.version}`),
    differences.length ? list(differences) : h("p", null, "Nothing would change."),
    warnings.length ? h("div", { class: "outcome warn" }, list(warnings.map((text) => `Warning: ${text}`))) : h("span"),
    ...(preview ? past(preview) : [h("p", { class: "note" }, "This conductor's version does not support previews.")]),
    notes.length ? h("details", null, h("summary", null, "Maximum prompt lengths"), list(notes)) : h("span"),
  );
}

function past(preview) {
  if (!preview.judged) return [h("p", { class: "note" }, "No preview: no request has been evaluated yet.")];
  const forgotten = preview.forgotten ? `; ${count(preview.forgotten)} earlier ones are no longer recorded` : "";
  const caption = `Effect on the last ${count(preview.judged)} requests that the conductor evaluated, over ${duration(preview.span_s)}${forgotten}: before → now`;
  return [
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Preview" },
      h(
        "table",
        { class: "preview" },
        h("caption", null, h("span", null, caption)),
        h("thead", null, h("tr", null, ...HEADINGS.map((label, index) => h("th", { scope: "col", class: index > 1 ? "number" : null }, label)))),
        h("tbody", null, ...preview.rows.map(row)),
      ),
    ),
    list(caveats(preview)),
  ];
}

function row(each) {
  const before = each.stay_admitted + each.now_rejected;
  const now = each.stay_admitted + each.now_admitted;
  const cells = [
    count(before + each.now_admitted + each.stay_rejected),
    `${count(before)} → ${count(now)}`,
    each.now_rejected ? `${count(each.now_rejected)} (${count(each.now_rejected_met)} of them met their objectives)` : "0",
    count(each.now_admitted),
    `${kept(each.met_before, each.missed_before)} → ${kept(each.met_now, each.missed_now)}`,
  ];
  return h("tr", null, h("th", { scope: "row" }, name(each.model)), h("td", null, name(each.slo_class || "(none)")), ...cells.map((text) => h("td", { class: "number" }, text)));
}

const kept = (met, missed) => (met + missed ? `${share(met, met + missed)} of ${count(met + missed)}` : "none measured");

function caveats(preview) {
  const sum = (key) => preview.rows.reduce((total, each) => total + each[key], 0);
  const told = ["Each request is evaluated again with its prediction at that time. The preview ignores that admitting other requests would have changed the queues."];
  if (sum("now_admitted")) told.push(`The durations of the ${count(sum("now_admitted"))} newly admitted requests are unknown: they were never served.`);
  if (sum("unmeasured")) told.push(`${count(sum("unmeasured"))} admitted requests have no times: cancelled, failed or still running.`);
  if (preview.admission !== "enforce") told.push(`Admission is ${preview.admission}: "rejected" means "would be rejected"; no request is rejected for its objectives.`);
  else if (preview.mode === "none") told.push("The admission mode is none: no request is rejected for its objectives.");
  else if (preview.mode === "load") told.push("Decode load is evaluated after the prefill; for requests that were rejected before it, that part is unknown.");
  return told;
}

const list = (texts) => h("ul", { class: "notes" }, ...texts.map((text) => h("li", null, text)));
