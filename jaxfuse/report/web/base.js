// The data, and what every part of the page uses. All text goes through textContent: nothing of the program is read as HTML.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const equations = data.equations.map(([primitive, inputs, outputs, bytes, reads, source, scope, direction, parent]) => ({
  primitive: data.strings[primitive], inputs: inputs.map(i => data.strings[i]), outputs: outputs.map(i => data.strings[i]), bytes, reads,
  source: data.strings[source], scope: data.strings[scope], direction: data.strings[direction], parent, readers: [],
}));
equations.forEach((equation, i) => equation.reads.forEach(from => equations[from].readers.push(i)));
for (const equation of equations) { // those of numbers, and of other constants alone
  equation.isConstant = equation.reads.every(from => equations[from].isConstant)
    && (equation.inputs.length === equation.reads.length || equation.inputs.every(type => type.endsWith("[]")));
}
const states = { fused: "fused", skipped: "left to XLA", step: "step outside" };

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined && child !== ""));
  return made;
}

function bytes(number) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let i = 0;
  for (; number >= 1000 && i < units.length - 1; i++) number /= 1000;
  return `${i && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[i]}`;
}

function milliseconds(time) {
  return time === null || time === undefined ? "" : time >= 100 ? time.toFixed(0) : time >= 1 ? time.toFixed(2) : time.toFixed(3);
}

const canvas = document.createElement("canvas").getContext("2d");
const widths = new Map();

function textWidth(text, size) {
  const key = size + text;
  if (!widths.has(key)) {
    canvas.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
    widths.set(key, canvas.measureText(text).width);
  }
  return widths.get(key);
}

// The text, its middle left out where it is wider than `width`.
function shortened(text, size, width) {
  if (textWidth(text, size) <= width) return text;
  let keep = text.length - 1;
  const cut = n => `${text.slice(0, Math.ceil(n * 0.6))}…${text.slice(text.length - Math.floor(n * 0.4))}`;
  while (keep > 3 && textWidth(cut(keep), size) > width) keep--;
  return cut(keep);
}

const tip = document.getElementById("tip");

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

function hideTip() {
  tip.hidden = true;
}
