// The tree of boxes, and where each is drawn: layers from the first equation down, in columns like those of a newspaper.
const COLUMN = 560, ROW = 900, GAP = { x: 16, y: 22, column: 46 }, PAD = 12, HEAD = 26;
const root = grown(data.tree, null);
const leafOf = new Map(); // equation -> the innermost box it stands in
const boxOf = new Map(); // site -> box
index(root);
lift();

function grown([kind, label, note, site, equation, children], parent) {
  const box = { kind, label, note, site, equation, parent, depth: parent ? parent.depth + 1 : 0, links: new Map(), isOpen: false, counts: null };
  box.children = children.map(child => grown(child, box));
  return box;
}

function index(box) {
  if (box.site !== null) boxOf.set(box.site, box);
  if (box.equation !== null && !leafOf.has(box.equation)) leafOf.set(box.equation, box);
  box.children.forEach(index);
  box.counts = { fused: 0, skipped: 0, step: 0, equations: box.children.length ? 0 : 1 };
  if (box.site !== null) box.counts[data.sites[box.site].state]++;
  for (const child of box.children) for (const key in box.counts) box.counts[key] += child.counts[key];
}

// An arrow between two equations is one between the boxes that contain them and lie in the same box. Constants have none: one that
// many read would cross everything.
function lift() {
  equations.forEach((equation, to) => equation.reads.forEach(from => {
    if (equations[from].isConstant) return;
    let a = leafOf.get(from), b = leafOf.get(to);
    if (!a || !b) return;
    while (a.depth > b.depth) a = a.parent;
    while (b.depth > a.depth) b = b.parent;
    while (a !== b && a.parent !== b.parent) [a, b] = [a.parent, b.parent];
    if (a === b) return;
    const reads = a.parent.links.get(b) || new Set();
    a.parent.links.set(b, reads.add(a));
  }));
}

// Gives the box a width and a height, and each box in it a place relative to it.
function layOut(box) {
  const isLeaf = !box.children.length || !box.isOpen;
  if (isLeaf) {
    const small = box.kind === "equation";
    const width = Math.max(textWidth(box.label, small ? 11 : 12) + (box.children.length ? 14 : 0), textWidth(noteOf(box), 10));
    box.w = Math.min(Math.max(width + 20, 64), 250);
    box.h = noteOf(box) ? 38 : 26;
    if (isGroup(box) && box.counts.fused + box.counts.skipped) box.h += 6;
    return;
  }
  box.children.forEach(layOut);
  if (box.kind === "root") beside(box);
  else inColumns(box, layersOf(box));
}

function isGroup(box) {
  return box.children.length > 0 && box.kind !== "site";
}

function noteOf(box) {
  if (!isGroup(box)) return box.note;
  const { fused, skipped, equations } = box.counts;
  const words = [];
  if (fused + skipped) words.push(`${fused} of ${fused + skipped} fused`);
  words.push(`${equations} equation${equations === 1 ? "" : "s"}`);
  return words.join(" · ");
}

function beside(box) {
  if (box.children[0].kind !== "pass") return inColumns(box, layersOf(box), 0);
  let x = 0;
  for (const child of box.children) {
    Object.assign(child, { x, y: 0, column: 0, layer: 0 });
    x += child.w + GAP.column;
  }
  box.w = x - GAP.column;
  box.h = Math.max(...box.children.map(child => child.h));
}

// Longest path from the first box. Children are in the program's order; an arrow against it is drawn, and moves nothing.
function layersOf(box) {
  const order = new Map(box.children.map((child, i) => [child, i])), layers = [];
  for (const child of box.children) {
    const before = [...(box.links.get(child) || [])].filter(from => order.get(from) < order.get(child));
    child.layer = before.length ? 1 + Math.max(...before.map(from => from.layer)) : 0;
    child.rank = before.length ? before.reduce((sum, from) => sum + from.rank, 0) / before.length : order.get(child);
    (layers[child.layer] ||= []).push(child);
  }
  return layers.map(layer => layer.sort((a, b) => a.rank - b.rank));
}

function inColumns(box, layers, head = HEAD) {
  const rows = layers.flatMap(rowsOf);
  const total = rows.reduce((sum, row) => sum + row.h + GAP.y, 0), widest = Math.max(...rows.map(row => row.w));
  const limit = Math.max(COLUMN, 0.8 * Math.sqrt(total * (widest + GAP.column)));
  const columns = [[]];
  let height = 0;
  for (const row of rows) {
    if (height && height + row.h > limit) { columns.push([]); height = 0; }
    columns.at(-1).push(row);
    height += row.h + GAP.y;
  }
  let x = PAD, bottom = 0;
  columns.forEach((column, number) => {
    const width = Math.max(...column.map(row => row.w));
    let y = head + PAD - 4;
    for (const row of column) {
      let left = x + (width - row.w) / 2;
      for (const child of row.boxes) {
        Object.assign(child, { x: left, y: y + (row.h - child.h) / 2, column: number });
        left += child.w + GAP.x;
      }
      y += row.h + GAP.y;
    }
    column.right = x + width;
    bottom = Math.max(bottom, y - GAP.y);
    x += width + (passesBy(box, column) ? GAP.column : GAP.column - 16);
  });
  box.w = Math.max(x - GAP.column + 16 + PAD, textWidth(box.label, 12) + textWidth(noteOf(box), 10) + 56);
  box.h = bottom + PAD;
  box.rights = columns.map(column => column.right);
}

// Whether an arrow leaves out a layer: it needs room beside the column.
function passesBy(box, column) {
  const here = new Set(column.flatMap(row => row.boxes));
  return [...here].some(child => [...(box.links.get(child) || [])].some(from => here.has(from) && Math.abs(child.layer - from.layer) > 1));
}

function rowsOf(layer) {
  const rows = [];
  let row = null;
  const width = Math.max(ROW / 2, Math.sqrt(layer.length) * 150);
  for (const child of layer) {
    if (!row || row.w + GAP.x + child.w > Math.min(width, 2400) && row.boxes.length) rows.push(row = { boxes: [], w: -GAP.x, h: 0 });
    row.boxes.push(child);
    row.w += GAP.x + child.w;
    row.h = Math.max(row.h, child.h);
  }
  return rows;
}

// The path of an arrow between two boxes of one box.
function arrow(box, from, to) {
  const a = { left: from.x, right: from.x + from.w, bottom: from.y + from.h, x: from.x + from.w / 2, y: from.y + from.h / 2 };
  const b = { left: to.x, right: to.x + to.w, top: to.y, x: to.x + to.w / 2, y: to.y + to.h / 2 };
  if (box.kind === "root" && from.kind === "pass") return `M${a.right} 14 L${b.left} 14`;
  if (from.column === to.column && to.y >= a.bottom) {
    if (to.layer - from.layer <= 1) {
      const middle = Math.max(8, (b.top - a.bottom) / 2);
      return `M${a.x} ${a.bottom} C${a.x} ${a.bottom + middle} ${b.x} ${b.top - middle} ${b.x} ${b.top}`;
    }
    const side = Math.max(a.right, b.right, box.rights[from.column]) + 20;
    return `M${a.right} ${a.y} C${side} ${a.y} ${side} ${a.y} ${side} ${(a.y + b.y) / 2} S${side} ${b.y} ${b.right} ${b.y}`;
  }
  if (from.column < to.column) {
    const middle = b.left - (GAP.column - 16) / 2;
    return `M${a.right} ${a.y} C${Math.max(middle, a.right + 10)} ${a.y} ${middle} ${b.y} ${b.left} ${b.y}`;
  }
  return `M${a.left} ${a.y} C${a.left - 24} ${a.y} ${b.left - 24} ${b.y} ${b.left} ${b.y}`;
}
