// All sites: filtered, searched, sorted.
const isTimed = data.sites.some(site => site.fused_ms !== null || site.unfused_ms !== null || site.why);
const COLUMNS = [
  { name: "", key: site => site.state, cell: site => element("span", { class: `badge ${site.state}` }, states[site.state]), class: "keep" },
  { name: "pattern", key: site => site.pattern },
  { name: "direction", key: site => site.direction, class: "keep" },
  { name: "module", key: site => site.module, cell: site => broken(site.module), class: "wide path" },
  { name: "source", key: site => site.source, cell: site => element("span", { title: site.source }, site.source.split("/").pop()), class: "wide keep" },
  { name: "operands", key: site => site.operands, class: "mono wide" },
  { name: "kernel, or reason", key: site => site.kernel || site.reason, class: "words" },
  { name: "saved", key: site => site.bytes_saved, cell: site => site.bytes_saved ? bytes(site.bytes_saved) : "", class: "number" },
  ...(isTimed ? [
    { name: "ms unfused", key: site => site.unfused_ms ?? -1, cell: site => milliseconds(site.unfused_ms) || "–", class: "number" },
    { name: "ms fused", key: site => site.fused_ms ?? -1, cell: site => milliseconds(site.fused_ms) || "–", class: "number" },
  ] : []),
];
const filter = { words: [], states: new Set(Object.keys(states)), direction: "", pattern: "" };
const sorting = { column: null, down: false };
const rowOf = new Map();
const search = document.getElementById("search");

function startTable() {
  data.sites.forEach((site, i) => {
    site.text = [site.pattern, site.direction, site.module, site.source, site.operands, site.kernel, site.reason].join(" ").toLowerCase();
    const cells = COLUMNS.map(({ key, cell, class: name }) => element("td", { class: name }, cell ? cell(site) : key(site)));
    const press = () => { choose({ site: i }); };
    rowOf.set(i, element("tr", { tabindex: 0, "data-site": i, onclick: press, onkeydown: event => { if (event.key === "Enter") press(); } }, ...cells));
  });
  const heads = COLUMNS.map((column, i) => element("th", { class: (column.class || "").replace("mono", ""), scope: "col", onclick: () => sortBy(i) }, column.name));
  document.querySelector("#rows thead").append(element("tr", {}, ...heads));
  search.addEventListener("input", () => { filter.words = search.value.toLowerCase().split(/\s+/).filter(Boolean); list(); });
  for (const key of ["direction", "pattern"]) {
    document.getElementById(key).addEventListener("change", event => { filter[key] = event.target.value; list(); });
  }
  const patterns = [...new Set(data.sites.map(site => site.pattern))].sort();
  document.getElementById("pattern").append(...patterns.map(pattern => element("option", { value: pattern }, pattern)));
  document.getElementById("states").append(...Object.keys(states).map(stateButton));
  if (isTimed) document.getElementById("measured").textContent = "Milliseconds: each site's own program, compiled alone and run on random inputs of its shapes; in the whole program XLA may fuse its neighbours too. A site in a loop: one turn. Sites with equal programs are measured once.";
  list();
}

// A path that may be broken behind its slashes.
function broken(path) {
  return element("span", {}, ...path.split(/(?<=\/)/).flatMap(part => [part, element("wbr")]));
}

function stateButton(state) {
  const count = data.sites.filter(site => site.state === state).length;
  return element("button", {
    class: "button", "aria-pressed": "true", "data-state": state, onclick: event => {
      const wasOn = filter.states.delete(state);
      if (!wasOn) filter.states.add(state);
      event.currentTarget.setAttribute("aria-pressed", String(!wasOn));
      list();
    },
  }, `${states[state]} ${count}`);
}

function sortBy(column) {
  sorting.down = sorting.column === column ? !sorting.down : COLUMNS[column].class === "number";
  sorting.column = column;
  document.querySelectorAll("#rows th").forEach((head, i) => {
    head.textContent = COLUMNS[i].name + (i === column ? (sorting.down ? " ↓" : " ↑") : "");
    head.setAttribute("aria-sort", i !== column ? "none" : sorting.down ? "descending" : "ascending");
  });
  list();
}

function list() {
  let found = data.sites.map((site, i) => i).filter(i => isListed(data.sites[i]));
  if (sorting.column !== null) {
    const { key } = COLUMNS[sorting.column], sign = sorting.down ? -1 : 1;
    found = found.sort((a, b) => {
      const [one, other] = [key(data.sites[a]), key(data.sites[b])];
      return sign * (typeof one === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true })) || a - b;
    });
  }
  document.querySelector("#rows tbody").replaceChildren(...found.map(i => rowOf.get(i)));
  document.getElementById("count").textContent = `${found.length} of ${data.sites.length} sites`;
}

function isListed(site) {
  return filter.states.has(site.state) && (!filter.direction || site.direction === filter.direction)
    && (!filter.pattern || site.pattern === filter.pattern) && filter.words.every(word => site.text.includes(word));
}
