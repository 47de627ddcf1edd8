// One site or equation: what it is, what computes it, the code it comes from.
const detail = document.getElementById("detail");
const siteOf = new Map();
data.sites.forEach((site, i) => site.equations.forEach(equation => { if (!siteOf.has(equation)) siteOf.set(equation, i); }));

// Shows it beside the page, marks it in the table and in the graph.
function choose({ site = null, equation = null }) {
  const box = site === null ? leafOf.get(equation) : boxOf.get(site) || leafOf.get(data.sites[site].equations[0]);
  rowOf.forEach((row, i) => row.classList.toggle("chosen", i === site));
  const button = element("button", { class: "button close", onclick: unchoose, "aria-label": "Close" }, "✕");
  detail.replaceChildren(button, ...(site === null ? equationShown(equation) : siteShown(site)));
  detail.hidden = false;
  detail.scrollTop = 0;
  if (box && data.equations.length) reveal(box);
}

function unchoose() {
  detail.hidden = true;
  chosenBox = null;
  rowOf.forEach(row => row.classList.remove("chosen"));
  if (data.equations.length) draw();
}

function siteShown(i) {
  const site = data.sites[i];
  const own = new Set(site.equations);
  const neighbours = (key, isInOrder) => [...new Set(site.equations.flatMap(e => equations[e][key]))].filter(e => !own.has(e) && isInOrder(data.sites[siteOf.get(e)]));
  return [
    element("h2", {}, site.pattern),
    element("p", {}, element("span", { class: `badge ${site.state}` }, states[site.state]), ` ${site.direction}`),
    facts([["kernel", site.kernel], [site.heading || "reason", site.reason], ["module", site.module], ["source", site.source],
      ["saves", site.bytes_saved ? `${bytes(site.bytes_saved)} of memory traffic, by estimate` : ""],
      ["unfused", time(site.unfused_ms)], ["fused", time(site.fused_ms)], ["not measured", site.why]]),
    ...section("Operands", typesShown(site.types)),
    ...code(site.source),
    // a backward site takes equations of the forward pass over: then it seems to be read before it runs
    ...section("Reads from", links(neighbours("reads", other => !other || other.direction === "forward" || site.direction === "backward"))),
    ...section("Read by", links(neighbours("readers", other => !other || other.direction === "backward" || site.direction === "forward"))),
    ...section(`${site.equations.length} equation${site.equations.length === 1 ? "" : "s"}`, equationList(site.equations)),
  ];
}

function equationShown(i) {
  const equation = equations[i], site = siteOf.get(i);
  return [
    element("h2", {}, equation.primitive),
    element("p", { class: "quiet" }, `${equation.direction} · equation ${i}`),
    facts([["scope", equation.scope], ["source", equation.source], ["writes", bytes(equation.bytes)]]),
    ...section("Site", site === undefined ? null : siteLink(site)),
    ...section("Inputs", typesShown(equation.inputs)),
    ...section("Outputs", typesShown(equation.outputs)),
    ...code(equation.source),
    ...section("Reads from", links(equation.reads)),
    ...section("Read by", links(equation.readers)),
  ];
}

function time(milli) {
  return milli === null ? "" : `${milliseconds(milli)} ms alone`;
}

function facts(pairs) {
  return element("dl", {}, ...pairs.filter(([, value]) => value).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function section(title, content) {
  return content ? [element("h3", {}, title), content] : [];
}

function typesShown(types) {
  return types.length ? element("div", { class: "mono" }, ...types.map(type => element("div", {}, `${type}  ${sized(type)}`))) : null;
}

function sized(type) {
  const [, kind, shape] = /^(\w+)\[([\d,]*)\]$/.exec(type) || [];
  if (!kind) return "";
  const bits = /float8|int4|uint4/.test(kind) ? 8 : Number((/\d+$/.exec(kind) || [8])[0]);
  return bytes(shape.split(",").filter(Boolean).reduce((product, n) => product * n, 1) * bits / 8);
}

// The lines around the one that made it.
function code(source) {
  const at = source.lastIndexOf(":"), lines = data.code[source.slice(0, at)], here = Number(source.slice(at + 1));
  if (!lines) return [];
  const shown = Object.keys(lines).map(Number).filter(n => Math.abs(n - here) <= data.around);
  if (!shown.length) return [];
  return section("Code", element("pre", {}, ...shown.map(n => element("span", { "data-line": n, class: n === here ? "here" : null }, lines[n] || " "))));
}

// The sites and the equations outside of sites, as buttons.
function links(found) {
  const sites = [...new Set(found.map(e => siteOf.get(e)).filter(site => site !== undefined))];
  const others = found.filter(e => siteOf.get(e) === undefined);
  if (!sites.length && !others.length) return null;
  const shown = others.slice(0, 20).map(e => element("button", { class: "button", onclick: () => choose({ equation: e }) }, equations[e].primitive));
  const more = others.length > 20 ? element("span", { class: "quiet" }, `and ${others.length - 20} equations`) : null;
  return element("div", { class: "links" }, ...sites.slice(0, 30).map(siteLink), ...shown, more);
}

function siteLink(i) {
  const site = data.sites[i];
  return element("button", { class: "button", onclick: () => choose({ site: i }), title: site.module }, element("span", { class: `badge ${site.state}` }, site.pattern), ` ${site.direction}`);
}

function equationList(indices) {
  const shown = indices.slice(0, 60).map(i => element("div", {}, `${equations[i].primitive}  ${equations[i].outputs.join(", ")}`));
  return indices.length ? element("div", { class: "mono" }, ...shown, indices.length > 60 ? `and ${indices.length - 60} more` : null) : null;
}
