// Live memory by equation, as written and fused.
const timeline = document.getElementById("timeline");
const EDGE = { left: 62, right: 12, top: 14, bottom: 24 };
const HEIGHT = 240;

function drawMemory() {
  const { before, after } = data.memory, count = before.length;
  const width = timeline.clientWidth, top = Math.max(...before, ...after) * 1.05;
  const x = i => EDGE.left + (width - EDGE.left - EDGE.right) * i / Math.max(1, count - 1);
  const y = value => HEIGHT - EDGE.bottom - (HEIGHT - EDGE.top - EDGE.bottom) * value / top;
  const cursor = drawn("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
  const at = event => {
    const part = (event.clientX - timeline.getBoundingClientRect().left - EDGE.left) / (width - EDGE.left - EDGE.right);
    return Math.max(0, Math.min(count - 1, Math.round(part * (count - 1))));
  };
  const svg = drawn("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": "Live memory as written and fused, by equation",
    onmousemove: event => {
      const i = at(event);
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(i));
      cursor.setAttribute("visibility", "visible");
      showTip(event, `${equations[i].primitive} · ${equations[i].source}\nas written ${bytes(before[i])} · fused ${bytes(after[i])}`);
    },
    onmouseleave: () => { cursor.setAttribute("visibility", "hidden"); hideTip(); },
    onclick: event => choose({ equation: at(event) }),
  }, ...grid(top, y, width), ...passes(x));
  const base = y(0);
  svg.append(drawn("path", { class: "after", d: `M${x(0)} ${base}${steps(after, x, y)}L${x(count - 1)} ${base}Z` }),
    drawn("path", { class: "before", d: `M${steps(before, x, y).slice(1)}` }), cursor);
  timeline.replaceChildren(svg);
  document.getElementById("moment").textContent = `peak ${bytes(Math.max(...before))} as written, ${bytes(Math.max(...after))} fused`;
}

// One point for each column of pixels: the largest value in it.
function steps(values, x, y) {
  const points = new Map();
  values.forEach((value, i) => {
    const at = Math.round(x(i));
    points.set(at, Math.max(points.get(at) ?? 0, value));
  });
  return [...points].map(([at, value]) => `L${at} ${y(value).toFixed(1)}`).join("");
}

function grid(top, y, width) {
  const unit = 10 ** Math.floor(Math.log10(top || 1)), step = [0.2, 0.5, 1, 2].map(n => n * unit).find(n => top / n <= 6) || unit;
  const found = [];
  for (let value = 0; value <= top; value += step) {
    found.push(drawn("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      drawn("text", { x: EDGE.left - 8, y: y(value) + 4, "text-anchor": "end" }, bytes(value)));
  }
  return found;
}

// Where the backward pass begins and ends.
function passes(x) {
  const isBackward = i => equations[i].direction === "backward";
  const all = [...data.memory.before.keys()].filter(isBackward);
  if (!all.length) return [drawn("text", { x: x(0), y: HEIGHT - 7 }, "equations of the program")];
  const marks = [["forward", 0], ["backward", all[0]]];
  if (all.at(-1) < data.memory.before.length - 20) marks.push(["update", all.at(-1) + 1]);
  return marks.flatMap(([name, i], n) => {
    const crowded = n + 1 < marks.length && x(marks[n + 1][1]) - x(i) < 60;
    return [drawn("line", { class: "pass", x1: x(i), x2: x(i), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
      drawn("text", { x: x(i) + (n ? 4 : 0), y: HEIGHT - 7 }, crowded ? "" : name)];
  });
}
