// Starts the parts that the report has.
const theme = document.getElementById("theme");

function setTheme(name) {
  document.documentElement.dataset.theme = name;
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
theme.addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
startTable();
for (const part of ["program", "memory"]) {
  const isThere = data.equations.length > 0;
  document.getElementById(part).hidden = !isThere;
  document.querySelector(`nav a[href="#${part}"]`).hidden = !isThere;
}
if (data.equations.length) {
  startGraph();
  drawMemory();
  addEventListener("resize", drawMemory);
}
addEventListener("keydown", event => {
  if (event.key === "Escape") unchoose();
  if (event.key === "/" && event.target !== search) { event.preventDefault(); search.focus(); }
});
