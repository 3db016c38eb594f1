// A request's timeline as a picture: a lane for each place, durations to scale, arrows where the request moves on.
// It is drawn in pixels of its own width, so that its text keeps its size on narrow screens.
import { barKey, swatch } from "./bars.js";
import { h, setAttribute, svg } from "./dom.js";
import { seconds } from "./format.js";
import { LANES, ticks } from "./timeline.js";

const LANE = 42; // height of a lane: its name, then its bar
const BAR = 16;
const AXIS = 20;
const STRIP = 44; // above the lanes: the whole request
const CHARACTER = 6.6; // width of one, about
const LEAST = 2; // width of a bar
const MUCH = 1.5; // the whole request is shown as well if it takes this many times as long as its first part

const words = (x, y, text, attributes) => svg("text", { x: x.toFixed(1), y: y.toFixed(1), ...attributes }, text);
const block = (x, y, width, className) => svg("rect", { x: x.toFixed(1), y, width: Math.max(LEAST, width).toFixed(1), height: BAR, class: className });

export function diagram(timeline, known) {
  const picture = svg("svg", { class: "diagram", role: "img" });
  const node = h("div", { class: "picture" }, picture);
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.floor(node.clientWidth);
    if (width <= 0 || width === drawn) return;
    drawn = width;
    draw(picture, timeline, known, width);
  }).observe(node);
  setAttribute(picture, "aria-label", summary(timeline));
  return node;
}

function summary({ spans, tokens, wholeS }) {
  const named = (lane) => spans.find((span) => span.lane === lane && span.node)?.node;
  const said = [`Timeline of the request, ${seconds(wholeS)}`];
  if (tokens[0] !== null) said.push(`first token after ${seconds(tokens[0])}`);
  if (named("prefill")) said.push(`prefill on ${named("prefill")}`);
  if (named("decode")) said.push(`decode on ${named("decode")}`);
  return `${said.join(", ")}. The list of steps has the same times.`;
}

function draw(picture, timeline, known, width) {
  const { spans, overlap, tokens } = timeline;
  const mostS = shownS(timeline);
  const isLong = mostS < timeline.wholeS;
  const at = (timeS) => (Math.min(timeS, mostS) / mostS) * (width - 2) + 1;
  const used = Object.keys(LANES).filter((lane) => (lane === "tokens" ? tokens[0] !== null : spans.some((span) => span.lane === lane)));
  const top = isLong ? STRIP : 0;
  const barOf = (lane) => top + AXIS + used.indexOf(lane) * LANE + 18;
  const bottom = top + AXIS + used.length * LANE + 4;
  const parts = [];
  if (isLong) parts.push(...strip(timeline, width, at(mostS)));
  parts.push(...axis(mostS, width, at, top, bottom), ...promised(known, mostS, width, at, top, bottom));
  for (const span of spans) {
    const [x, y] = [at(span.from), barOf(span.lane)];
    const wide = at(span.from + span.took) - x;
    parts.push(block(x, y, wide, `bar-${span.kind}`));
    const text = span.from + span.took > mostS ? `${seconds(span.took)} →` : seconds(span.took);
    if (wide > text.length * CHARACTER + 8) parts.push(words(x + wide / 2, y + 12, text, { class: `inside on-${span.kind}`, "text-anchor": "middle" }));
  }
  if (overlap && used.includes("push")) parts.push(block(at(overlap.from), barOf("push"), at(overlap.from + overlap.took) - at(overlap.from), "bar-overlap"));
  if (used.includes("tokens")) parts.push(...tokenLane(tokens, at, barOf("tokens"), mostS, timeline));
  spans.slice(1).forEach((span, index) => {
    const from = span.lane !== "frontend" && hasDelivered(spans, index) ? spans[index - 1] : spans[index];
    if (span.lane !== from.lane) parts.push(arrow(at(span.from), barOf(from.lane), barOf(span.lane)));
  });
  for (const lane of used) parts.push(words(1, barOf(lane) - 5, titleOf(lane, spans), { class: "lane" }));
  setAttribute(picture, "width", width);
  setAttribute(picture, "height", bottom);
  setAttribute(picture, "viewBox", `0 0 ${width} ${bottom}`);
  picture.replaceChildren(...parts);
}

// End of the part that the lanes show.
const shownS = ({ focusS, wholeS }) => (wholeS > MUCH * focusS ? focusS * 1.06 : wholeS);

// A token goes to the frontend while the request goes on where it is.
const hasDelivered = (spans, index) => index > 0 && spans[index].lane === "frontend" && ["prefill", "decode"].includes(spans[index - 1].lane);

function titleOf(lane, spans) {
  const nodes = [...new Set(spans.filter((span) => span.lane === lane && span.node).map((span) => span.node))];
  if (!nodes.length || lane === "push") return LANES[lane];
  return `${LANES[lane]} on ${nodes.map((node) => (node.length > 28 ? `${node.slice(0, 27)}…` : node)).join(", ")}`;
}

// The whole request above its first part, which the lanes show enlarged.
function strip({ tokens, focusS, wholeS }, width, right) {
  const at = (timeS) => (timeS / wholeS) * (width - 2) + 1;
  const firstS = tokens[0] ?? focusS;
  return [
    words(1, 11, `Whole request: ${seconds(wholeS)}. Below, its first ${seconds(focusS)}`, { class: "lane" }),
    block(1, 16, at(firstS) - 1, "bar-work"),
    block(at(firstS), 16, at(wholeS) - at(firstS), "bar-tokens"),
    svg("path", { class: "zoom", d: `M1 ${16 + BAR}L1 ${STRIP}L${right.toFixed(1)} ${STRIP}L${Math.max(at(focusS), 1 + LEAST).toFixed(1)} ${16 + BAR}Z` }),
  ];
}

function axis(mostS, width, at, top, bottom) {
  return ticks(mostS, Math.max(2, Math.floor(width / 110))).flatMap((timeS) => {
    const x = at(timeS);
    const isLast = x > width - 50;
    return [
      svg("line", { class: "grid-line", x1: x.toFixed(1), x2: x.toFixed(1), y1: top + AXIS - 4, y2: bottom }),
      words(isLast ? Math.min(x, width - 1) : x < 20 ? 1 : x, top + 12, seconds(timeS), { class: "tick", "text-anchor": isLast ? "end" : x < 20 ? "start" : "middle" }),
    ];
  });
}

// Predicted TTFT and its objective, if they lie in the picture.
function promised(known, mostS, width, at, top, bottom) {
  const lines = [["predicted", known?.predicted_ttft_s], ["objective", known?.ttft_objective_s]].filter(([, timeS]) => timeS > 0 && timeS <= mostS);
  return lines.map(([kind, timeS]) => svg("line", { class: `promise ${kind}`, x1: at(timeS).toFixed(1), x2: at(timeS).toFixed(1), y1: top + AXIS, y2: bottom }));
}

function tokenLane([firstS, nextS, lastS], at, y, mostS, { wholeS }) {
  const parts = lastS !== null && lastS > firstS ? [block(at(firstS), y, at(Math.min(lastS, mostS)) - at(firstS), "bar-tokens")] : [];
  for (const timeS of [firstS, nextS, lastS]) if (timeS !== null && timeS <= mostS) parts.push(svg("circle", { class: "token", cx: Math.min(Math.max(at(timeS), 6), at(mostS) - 6).toFixed(1), cy: y + 8, r: 5 }));
  if (wholeS > mostS) parts.push(svg("path", { class: "flow-head", d: `M${(at(mostS) - 7).toFixed(1)} ${y + 2}l7 6l-7 6z` }));
  return parts;
}

function arrow(x, from, to) {
  const isDown = to > from;
  const [start, end] = isDown ? [from + BAR, to - 1] : [from, to + BAR + 1];
  const head = isDown ? -5 : 5;
  return svg("path", { class: "flow", d: `M${x.toFixed(1)} ${start}V${end}m-3 ${head}l3 ${-head}l3 ${head}` });
}

// Meaning of the bars and lines.
export function legend(timeline, known) {
  const kinds = [
    ["work", "computes, decides or sends"],
    ["wait", "waits"],
    ["move", "moves KV"],
  ];
  if (timeline.overlap) kinds.push(["overlap", "pushes KV layer by layer while it computes; not timed"]);
  if (timeline.spans.some((span) => span.kind === "lost")) kinds.push(["lost", "lost"]);
  const lines = [["predicted", "predicted time to first token", known?.predicted_ttft_s], ["objective", "its objective", known?.ttft_objective_s]];
  const list = barKey(kinds);
  for (const [kind, text, timeS] of lines)
    if (timeS > 0 && timeS <= shownS(timeline)) list.append(h("li", null, swatch(svg("line", { class: `promise ${kind}`, x1: 8, x2: 8, y1: 0, y2: 14 })), `${text}: ${seconds(timeS)}`));
  return list;
}
