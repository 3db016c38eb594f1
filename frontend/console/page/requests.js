// Decisions on requests as they are made, and the path of one of them.
import { h } from "./dom.js";
import { Feed } from "./feed.js";
import { Path } from "./path.js";

export class Requests {
  constructor() {
    this.id = h("input", { id: "request-id", class: "mono", placeholder: "cmpl-…", autocomplete: "off", spellcheck: "false" });
    this.path = new Path();
    this.feed = new Feed();
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
      h("section", { class: "card" }, h("h2", null, "Decisions as they are made"), this.feed.node),
    );
  }

  open(id) {
    if (!id || id === this.path.id) return;
    this.id.value = id;
    this.path.load(id);
  }

  update(state) {
    this.feed.update(state);
    this.path.tick();
  }
}
