// Bars to scale and their key. The same colours have the same meaning in all pictures.
import { h, svg } from "./dom.js";
import { count } from "./format.js";

export const swatch = (shape) => svg("svg", { width: 16, height: 14, viewBox: "0 0 16 14", "aria-hidden": "true" }, shape);

// Meaning of the kinds of bars: [kind, text] each.
export const barKey = (kinds) =>
  h("ul", { class: "key" }, ...kinds.map(([kind, text]) => h("li", null, swatch(svg("rect", { class: `bar-${kind}`, width: 16, height: 10, y: 2 })), text)));

// Terms of a prediction to scale; [kind, seconds] each.
export function stacked(terms, mostS) {
  let from = 0;
  const rects = terms.map(([kind, timeS]) => {
    const rect = svg("rect", { class: `bar-${kind}`, x: ((100 * from) / mostS).toFixed(2), width: ((100 * timeS) / mostS).toFixed(2), height: 10 });
    from += timeS;
    return rect;
  });
  return svg("svg", { class: "stacked", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, ...rects);
}

const MOST_TURNS = 12; // of a session in the state

// Turns of a session: prompt tokens that were reused and computed, and generated ones, to scale.
export function turnBars(turns) {
  const most = Math.max(1, ...turns.map((turn) => turn.prompt_tokens + turn.generated));
  const [wide, high] = [100 / Math.max(MOST_TURNS, turns.length), 96];
  const bars = turns.flatMap((turn, index) => {
    const reused = Math.min(turn.reused_tokens, turn.prompt_tokens);
    let y = high;
    return [["move", reused], ["work", turn.prompt_tokens - reused], ["tokens", turn.generated]].map(([kind, tokens]) => {
      const size = (high * tokens) / most;
      y -= size;
      return svg("rect", { class: `bar-${kind}`, x: (index * wide + wide * 0.15).toFixed(2), y: y.toFixed(2), width: (wide * 0.7).toFixed(2), height: size.toFixed(2) });
    });
  });
  const last = turns[turns.length - 1];
  const label = `Tokens of the last ${count(turns.length)} turns; the latest has a prompt of ${count(last.prompt_tokens)}, of which ${count(last.reused_tokens)} were reused. The table has the same numbers.`;
  return svg("svg", { class: "turns", viewBox: `0 0 100 ${high}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...bars);
}
