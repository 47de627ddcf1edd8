// The program as boxes: opened and closed by a click, moved by dragging, zoomed.
const graph = document.getElementById("graph");
const SMALL = 60, FEW = 80; // equations, boxes
const view = { x: 0, y: 0, scale: 1 };
const canvasOf = drawn("g");
const arrows = drawn("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto-start-reverse" },
  drawn("path", { d: "M0 0L8 4L0 8z" }));
let chosenBox = null;

function startGraph() {
  graph.append(drawn("svg", {}, drawn("defs", {}, arrows), canvasOf));
  openModules();
  fit();
  document.getElementById("less").addEventListener("click", () => { close(root); openModules(); fit(); });
  document.getElementById("more").addEventListener("click", () => { openTo(box => box.counts.fused + box.counts.skipped + box.counts.step > 0 && box.kind !== "site"); fit(); });
  document.getElementById("in").addEventListener("click", () => zoom(1.3));
  document.getElementById("out").addEventListener("click", () => zoom(1 / 1.3));
  document.getElementById("fit").addEventListener("click", () => fit(0.05));
  graph.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const { left, top } = graph.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 300), event.clientX - left, event.clientY - top);
  }, { passive: false });
  drag();
}

// Opens boxes with sites, level by level while what is seen stays few; a small program whole.
function openModules() {
  const isSmall = equations.length <= SMALL;
  root.isOpen = true;
  for (let level = root.children, seen = level.length; level.length;) {
    const opened = level.filter(box => isGroup(box) && (isSmall || box.counts.fused + box.counts.skipped + box.counts.step > 0));
    const inside = opened.flatMap(box => box.children);
    seen += inside.length;
    if (seen > FEW) break;
    for (const box of opened) box.isOpen = true;
    level = inside;
  }
  draw();
}

function close(box) {
  box.isOpen = false;
  box.children.forEach(close);
}

function openTo(isWanted) {
  const visit = box => {
    box.isOpen = box === root || isWanted(box);
    box.children.forEach(visit);
  };
  visit(root);
  draw();
}

// As high as what it shows, within limits; it does not shrink under the pointer.
function grow() {
  const wanted = Math.min(Math.max(root.h * view.scale + 28, 260), 0.72 * innerHeight);
  if (wanted > graph.clientHeight) graph.style.height = `${wanted + 2}px`;
}

function draw() {
  layOut(root);
  canvasOf.replaceChildren(...picture(root));
  grow();
  place();
}

// What is inside a box: arrows below boxes.
function picture(box) {
  const paths = [];
  for (const [to, sources] of box.links) {
    for (const from of sources) {
      const isFar = Math.abs(to.layer - from.layer) > 1 || to.column !== from.column;
      paths.push(drawn("path", { d: arrow(box, from, to), class: isFar ? "far" : "", "marker-end": "url(#arrow)" }));
    }
  }
  return [...paths, ...box.children.map(boxDrawn)];
}

function boxDrawn(box) {
  const isOpen = box.isOpen && box.children.length > 0;
  const state = box.site === null ? "" : data.sites[box.site].state;
  const name = ["box", state, isGroup(box) ? "group" : box.kind, isOpen ? "" : "closed", box === chosenBox ? "chosen" : ""];
  const mark = box.children.length ? (isOpen ? "▾ " : "▸ ") : "";
  const size = box.kind === "equation" ? 11 : 12;
  const shape = drawn("g", {
    class: name.filter(Boolean).join(" "), transform: `translate(${box.x} ${box.y})`, tabindex: 0, role: "button", "data-box": box.label,
    "data-site": box.site, onclick: event => { event.stopPropagation(); pressed(box, event); }, onmousemove: event => { event.stopPropagation(); showTip(event, said(box)); },
    onmouseleave: hideTip, onkeydown: event => { if (event.key === "Enter") { event.stopPropagation(); pressed(box, event); } },
  }, drawn("rect", { width: box.w, height: box.h, rx: 6 }));
  const label = drawn("text", { x: 10, y: 17, class: isGroup(box) ? "title" : "" }, mark + shortened(box.label, size, box.w - 20 - (mark ? 12 : 0)));
  shape.append(label);
  if (isOpen) {
    shape.append(drawn("text", { x: box.w - 10, y: 17, class: "note", "text-anchor": "end" }, isGroup(box) ? noteOf(box) : ""), ...picture(box));
    return shape;
  }
  if (noteOf(box)) shape.append(drawn("text", { x: 10, y: 31, class: "note" }, shortened(noteOf(box), 10, box.w - 18)));
  if (isGroup(box)) shape.append(...share(box));
  return shape;
}

// A strip with the part of the sites that is fused.
function share({ w, h, counts }) {
  const all = counts.fused + counts.skipped;
  if (!all) return [];
  const width = w - 20, fused = width * counts.fused / all;
  return [drawn("rect", { class: "share of-skipped", x: 10, y: h - 8, width, height: 3, rx: 1.5 }),
    drawn("rect", { class: "share of-fused", x: 10, y: h - 8, width: fused, height: 3, rx: 1.5 })];
}

function said(box) {
  if (box.site !== null) return siteSaid(data.sites[box.site]);
  if (box.equation !== null && !box.children.length) {
    const equation = equations[box.equation];
    return `${equation.primitive}\n${equation.inputs.join(", ")} → ${equation.outputs.join(", ")}\n${bytes(equation.bytes)} · ${equation.source}`;
  }
  return `${box.label}\n${noteOf(box)}${box.equation === null ? "" : `\n${equations[box.equation].source}`}`;
}

function siteSaid(site) {
  const verdict = site.state === "fused" ? `${site.kernel}${site.bytes_saved ? `, saves ${bytes(site.bytes_saved)}` : ""}` : site.reason;
  return `${site.pattern} ${site.direction}: ${verdict}\n${site.operands}\n${site.source}`;
}

// A group opens and closes; a site or an equation shows its details, and its mark opens it.
function pressed(box, event) {
  hideTip();
  const { left, top } = event.currentTarget.getBoundingClientRect();
  const isOnMark = event.clientX && event.clientX - left < 24 * view.scale && event.clientY - top < 26 * view.scale;
  if (isGroup(box) || box.children.length && isOnMark) toggle(box);
  else choose(box.site !== null ? { site: box.site } : { equation: box.equation });
}

// What was clicked stays where it was.
function toggle(box) {
  const before = onScreen(box);
  box.isOpen = !box.isOpen;
  draw();
  const after = onScreen(box);
  view.x += before.x - after.x;
  view.y += before.y - after.y;
  place();
}

function onScreen(box) {
  let x = 0, y = 0;
  for (let at = box; at.parent; at = at.parent) { x += at.x; y += at.y; }
  return { x: view.x + x * view.scale, y: view.y + y * view.scale };
}

// Opens what is around the box, and moves it into the middle.
function reveal(box) {
  for (let at = box.parent; at; at = at.parent) at.isOpen = true;
  chosenBox = box;
  draw();
  view.scale = Math.max(view.scale, 0.8);
  const { x, y } = onScreen(box), { left, top, right, bottom } = graph.getBoundingClientRect();
  const cover = detail.hidden ? { left: right, top: bottom } : detail.getBoundingClientRect(), isBelow = cover.left <= left;
  const width = (isBelow ? right : Math.min(right, cover.left)) - left, height = (isBelow ? Math.min(bottom, cover.top) : bottom) - top;
  view.x += width / 2 - x - box.w * view.scale / 2;
  view.y += (height > 60 ? height : bottom - top) / 2 - y - box.h * view.scale / 2;
  place();
}

function fit(least = 0.66) {
  const width = graph.clientWidth, height = 0.72 * innerHeight;
  view.scale = Math.max(least, Math.min(1.2, (width - 24) / root.w, (height - 24) / root.h));
  view.x = Math.max(12, (width - root.w * view.scale) / 2);
  view.y = 14;
  graph.style.height = "0";
  grow();
  place();
}

function zoom(by, x = graph.clientWidth / 2, y = graph.clientHeight / 2) {
  const scale = Math.max(0.05, Math.min(4, view.scale * by));
  view.x = x - (x - view.x) * scale / view.scale;
  view.y = y - (y - view.y) * scale / view.scale;
  view.scale = scale;
  place();
}

function place() {
  canvasOf.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.scale})`);
}

function drag() {
  let start = null, hasMoved = false;
  graph.addEventListener("pointerdown", event => { start = { x: event.clientX - view.x, y: event.clientY - view.y, at: [event.clientX, event.clientY] }; hasMoved = false; });
  addEventListener("pointermove", event => {
    if (!start) return;
    hasMoved ||= Math.hypot(event.clientX - start.at[0], event.clientY - start.at[1]) > 4;
    if (!hasMoved) return;
    graph.classList.add("moving");
    hideTip();
    view.x = event.clientX - start.x;
    view.y = event.clientY - start.y;
    place();
  });
  addEventListener("pointerup", () => { start = null; graph.classList.remove("moving"); });
  graph.addEventListener("click", event => { if (hasMoved) event.stopPropagation(); hasMoved = false; }, true);
}
