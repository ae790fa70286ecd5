// One series over the last LEAST to SPAN seconds, drawn as SVG: a gap where there is no value; the one under the pointer is
// told.

const NS = "http://www.w3.org/2000/svg", LEAST = 60, SPAN = 300, LEFT = 34, BOTTOM = 16, TOP = 8;

function shape(parent, name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// the least round number from 1, 2 and 5 times a power of ten that is at least `value`
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map(step => step * power).find(top => top >= value * 0.999);
}

function since(seconds) {
  return seconds < 120 ? `${Math.round(seconds)} s ago` : `${(seconds / 60).toFixed(1)} min ago`;
}

export class Plot {
  // least: the axis reaches at least so high; from: where it begins; tell: a value in words
  constructor(svg, { least, from = 0, most = Infinity, tell }) {
    Object.assign(this, { svg, least, from, most, tell, points: [], pointer: null });
    new ResizeObserver(() => this.draw()).observe(svg);
    svg.addEventListener("pointermove", event => { this.pointer = event.offsetX; this.draw(); });
    svg.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
  }

  // time in seconds; a value of null is a gap
  add(time, value) {
    this.points.push({ time, value });
    while (this.points[0].time < time - SPAN - 5) this.points.shift();
    this.draw();
  }

  draw() {
    const { svg, points, from } = this, width = svg.clientWidth, height = svg.clientHeight;
    svg.replaceChildren();
    if (!width || !points.length) return;
    const now = points.at(-1).time, span = Math.min(SPAN, Math.max(LEAST, now - points[0].time));
    const known = points.filter(point => point.value !== null);
    const top = Math.min(this.most, from + ceiling(Math.max(this.least - from, ...known.map(p => p.value - from))));
    const x = time => LEFT + (width - LEFT - 4) * (1 - (now - time) / span);
    const y = value => TOP + (height - TOP - BOTTOM) * (1 - (value - from) / (top - from));
    for (const share of [0, 0.5, 1]) {
      const value = from + share * (top - from);
      shape(svg, "line", { class: "grid", x1: LEFT, x2: width - 4, y1: y(value), y2: y(value) });
      shape(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, +value.toPrecision(3));
    }
    for (const [ago, anchor] of [[span, "start"], [span / 2, "middle"], [0, "end"]])
      shape(svg, "text", { x: x(now - ago), y: height - 2, "text-anchor": anchor }, ago ? since(ago) : "now");
    for (const run of this.runs()) {
      const line = run.map(p => `${Math.max(LEFT, x(p.time)).toFixed(1)},${y(Math.min(p.value, top)).toFixed(1)}`);
      const [first, last] = [run[0], run.at(-1)].map(p => Math.max(LEFT, x(p.time)).toFixed(1));
      shape(svg, "path", { class: "area", d: `M${first},${y(from)}L${line.join("L")}L${last},${y(from)}Z` });
      shape(svg, "path", { class: "data", d: `M${line.join("L")}` + (run.length < 2 ? "h0.1" : "") });
    }
    this.mark(known, x, y, width);
  }

  // pieces of the series between gaps
  runs() {
    const runs = [[]];
    for (const point of this.points) point.value === null ? runs.push([]) : runs.at(-1).push(point);
    return runs.filter(run => run.length);
  }

  mark(known, x, y, width) {
    if (this.pointer === null || !known.length) return;
    const near = known.reduce((a, b) => Math.abs(x(a.time) - this.pointer) <= Math.abs(x(b.time) - this.pointer) ? a : b);
    const at = x(near.time), ago = Math.round(known.at(-1).time - near.time);
    shape(this.svg, "line", { class: "at", x1: at, x2: at, y1: TOP, y2: this.svg.clientHeight - BOTTOM });
    shape(this.svg, "circle", { class: "dot", cx: at, cy: y(near.value), r: 3.5 });
    shape(this.svg, "text", { class: "told", x: at + (at > width / 2 ? -8 : 8), y: TOP + 10,
                              "text-anchor": at > width / 2 ? "end" : "start" }, `${this.tell(near.value)}, ${ago} s ago`);
  }
}
