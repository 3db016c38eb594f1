// Small line charts as inline SVG: the last 15 minutes, one point per slice of time.
import { setAttribute, svg } from "./dom.js";
import { isNumber } from "./format.js";

const WIDTH = 200;
const HEIGHT = 46;

function path(points, most) {
  let text = "";
  let isDrawing = false;
  points.forEach((value, index) => {
    if (!isNumber(value)) {
      isDrawing = false;
      return;
    }
    const x = points.length > 1 ? (index / (points.length - 1)) * WIDTH : WIDTH;
    const y = HEIGHT - 2 - (value / most) * (HEIGHT - 6);
    text += `${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    isDrawing = true;
  });
  // An isolated point is drawn as a short line.
  return text.replace(/(M([\d.]+) ([\d.]+))(?=M|$)/g, "$1h1.5");
}

export class Chart {
  // `label` describes the chart; `format` formats the figures for screen readers.
  constructor(label, format) {
    this.label = label;
    this.format = format;
    this.area = svg("path", { class: "area" });
    this.first = svg("path", { class: "first" });
    this.second = svg("path", { class: "second" });
    this.node = svg(
      "svg",
      { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }),
      this.area,
      this.first,
      this.second,
    );
  }

  // Values by slice, oldest first; null: no measurement.
  draw(first, second = []) {
    const measured = [...first, ...second].filter(isNumber);
    const most = Math.max(...measured, 0) || 1;
    const line = path(first, most);
    setAttribute(this.first, "d", line);
    setAttribute(this.second, "d", path(second, most));
    const isWhole = first.every(isNumber) && first.length > 1;
    setAttribute(this.area, "d", isWhole ? `${line}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z` : "");
    const said = measured.length ? `at most ${this.format(most)}` : "no measurements";
    setAttribute(this.node, "aria-label", `${this.label}, the last 15 minutes: ${said}`);
  }
}
