// Table that is updated in place: sorted by its headings and filtered; focus and selection are kept.
import { h, setAttribute, setText } from "./dom.js";
import { NONE } from "./format.js";

const PAGE = 50;

export class DataTable {
  // columns: {name, label, value(row) -> value to sort by and show, show(row) -> text or node, number, isHead, fixed}
  // A cell's `show` may return a node, which is created again when `value` changes. `fixed`: created once per row.
  constructor({ caption, columns, key, empty, sort = null, descending = false, tall = false, paged = false }) {
    this.columns = columns;
    this.key = key;
    this.sort = sort;
    this.descending = descending;
    this.paged = paged;
    this.shown = PAGE;
    this.rows = [];
    this.made = new Map();
    this.heads = new Map(columns.map((column) => [column.name, this.#head(column)]));
    this.body = h("tbody");
    this.caption = h("caption", null, h("span", null, caption));
    this.table = h("table", null, this.caption, h("thead", null, h("tr", null, [...this.heads.values()])), this.body);
    this.empty = h("p", { class: "empty", hidden: true }, empty);
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.#showMore() });
    const label = `Table: ${caption}`;
    this.scroll = h("div", { class: tall ? "scroll tall" : "scroll", tabindex: 0, role: "region", "aria-label": label }, this.table);
    this.node = h("div", null, this.scroll, this.empty, this.more);
  }

  set(rows) {
    this.rows = rows;
    this.#draw();
  }

  show(name, isShown) {
    const column = this.columns.find((each) => each.name === name);
    if (column.isHidden === !isShown) return;
    column.isHidden = !isShown;
    this.heads.get(name).hidden = !isShown;
    for (const made of this.made.values()) made.cells.get(name).hidden = !isShown;
  }

  #head(column) {
    const attributes = { scope: "col", class: column.number ? "number" : null };
    if (column.fixed) return h("th", attributes, column.label);
    const button = h("button", { type: "button", onclick: () => this.#sortBy(column) }, column.label);
    return h("th", attributes, button);
  }

  #sortBy(column) {
    this.descending = this.sort === column.name ? !this.descending : Boolean(column.number);
    this.sort = column.name;
    this.#draw();
  }

  #showMore() {
    this.shown += 10 * PAGE;
    this.#draw();
  }

  #ordered() {
    const column = this.columns.find((each) => each.name === this.sort);
    if (!column) return this.rows;
    const sign = this.descending ? -1 : 1;
    const compare = (a, b) => {
      const [x, y] = [column.value(a) ?? null, column.value(b) ?? null];
      if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1;
      return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
    };
    return [...this.rows].sort((a, b) => compare(a, b) || String(this.key(a)).localeCompare(String(this.key(b)), "en", { numeric: true }));
  }

  #draw() {
    for (const [name, head] of this.heads)
      setAttribute(head, "aria-sort", name === this.sort ? (this.descending ? "descending" : "ascending") : null);
    const ordered = this.#ordered();
    const shown = this.paged ? ordered.slice(0, this.shown) : ordered;
    const keys = new Set(shown.map((row) => String(this.key(row))));
    for (const [key, made] of this.made)
      if (!keys.has(key)) {
        made.row.remove();
        this.made.delete(key);
      }
    shown.forEach((row, index) => {
      const made = this.#row(row);
      if (this.body.children[index] !== made.row) this.body.insertBefore(made.row, this.body.children[index] ?? null);
    });
    this.scroll.hidden = this.rows.length === 0;
    this.empty.hidden = this.rows.length > 0;
    this.more.hidden = ordered.length <= shown.length;
    setText(this.more, `Show more (${ordered.length - shown.length} further)`);
  }

  #row(row) {
    const key = String(this.key(row));
    let made = this.made.get(key);
    if (!made) {
      const cells = new Map(this.columns.map((column) => [column.name, this.#cell(column)]));
      made = { row: h("tr", null, [...cells.values()]), cells, last: new Map() };
      this.made.set(key, made);
    }
    for (const column of this.columns) {
      const told = column.value(row) ?? null;
      const cell = made.cells.get(column.name);
      const mark = column.mark ? column.mark(row) : told;
      if (made.last.has(column.name) && (column.fixed || made.last.get(column.name) === mark)) continue;
      made.last.set(column.name, mark);
      const shown = column.show ? column.show(row) : (told ?? NONE);
      if (shown instanceof Node) cell.replaceChildren(shown);
      else setText(cell, shown);
    }
    return made;
  }

  #cell(column) {
    const attributes = { class: column.number ? "number" : null, hidden: column.isHidden };
    return column.isHead ? h("th", { scope: "row", ...attributes }) : h("td", attributes);
  }
}

// Long names are shortened and shown in full on hover. Addresses are shortened at their start.
export const ending = (text) => h("span", { title: text }, text.length > 24 ? `…${text.slice(-23)}` : text);
export const name = (text) => h("span", { class: "name", title: text }, text);
