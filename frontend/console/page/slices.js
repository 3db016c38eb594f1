// The last 15 minutes as consecutive slices, with gaps for slices without events.
const SPAN_S = 900;

export function slicesOf(state, model) {
  const known = new Map(state.slices.map((slice) => [slice.number, slice.models[model]]));
  const last = Math.floor(state.now_s / state.slice_s);
  const count = Math.round(SPAN_S / state.slice_s);
  return Array.from({ length: count }, (_, index) => known.get(last - count + 1 + index) ?? null);
}
