// Values under the pointer, and a larger picture: everything else works without this script.
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;
const show = (value) => (value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4)));
const nearest = (all, wanted) => all.reduce((best, x, i) => (Math.abs(x - wanted) < Math.abs(all[best] - wanted) ? i : best), 0);

function words(data, x, down, range) {
  if (data.grid) {
    const column = nearest(data.steps, x);
    const row = Math.min(data.grid.length - 1, Math.max(0, Math.floor((down * data.ranks) / data.group)));
    const first = row * data.group, last = Math.min(first + data.group, data.ranks) - 1;
    const who = data.names ? data.names[row] : first === last ? `rank ${first}` : `ranks ${first} to ${last}`;
    return [data.steps[column], `${who}, step ${show(data.steps[column])}\n${show(data.grid[row][column])}${data.unit}`];
  }
  let at = null;
  const lines = (data.series || []).map((s) => {
    const xs = s.x || data.x, i = nearest(xs, x);
    if (at === null || Math.abs(xs[i] - x) < Math.abs(at - x)) at = xs[i];
    return `${s.n}: ${show(s.y[i])}` + (s.low && s.low[i] !== s.high[i] ? ` (${show(s.low[i])} to ${show(s.high[i])})` : "");
  });
  const marks = (data.marks || []).filter((m) => Math.abs(m[0] - x) < range / 120).slice(0, 3).map((m) => m[1]);
  return at === null ? null : [at, [`${data.of || "step"} ${show(at)}`, ...lines.slice(0, 12), ...marks].join("\n")];
}

// A copy of a chart that needs no page: its colours, its title and the name of the run are in it.
function copied(figure) {
  const svg = [...figure.querySelectorAll("svg")].find((one) => one.getClientRects().length).cloneNode(true);
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const set = (node, values) => Object.entries(values).forEach(([name, value]) => node.setAttribute(name, value));
  const make = (name, values) => { const node = document.createElementNS(svg.namespaceURI, name); set(node, values); return node; };
  const title = make("text", { x: 12, y: -12, style: "fill: var(--ink); font-size: 13px" });
  title.textContent = `${figure.querySelector("h3").textContent} · ${document.title}`;
  svg.prepend(make("rect", { y: -34, width, height: height + 34, style: "fill: var(--card)" }), title);
  set(svg, { viewBox: `0 -34 ${width} ${height + 34}`, width, height: height + 34, "font-family": "sans-serif" });
  const colours = getComputedStyle(document.documentElement);
  return new XMLSerializer().serializeToString(svg).replace(/var\((--\w+)\)/g, (_, name) => colours.getPropertyValue(name));
}

for (const script of document.querySelectorAll("figure > script")) {
  const figure = script.parentElement;
  const data = JSON.parse(script.textContent);
  const save = figure.appendChild(document.createElement("a"));
  save.className = "save";
  save.textContent = "SVG";
  save.title = "Download this chart";
  save.href = "#";
  save.download = `${figure.querySelector("h3").textContent.replace(/\W+/g, "-")}.svg`;
  save.addEventListener("click", () => { save.href = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(copied(figure)); });
  for (const svg of figure.querySelectorAll("svg")) {
    const [left, top, right, bottom, low, high] = svg.dataset.box.split(" ").map(Number);
    const home = svg.getAttribute("viewBox");
    const line = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
    line.setAttribute("style", "stroke: var(--muted); stroke-width: 0.8; fill: none");
    const place = (event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const leave = () => { tip.hidden = true; line.removeAttribute("d"); };
    let from = null;
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const p = place(event);
      const found = p.x < left || p.x > right ? null : words(data, low + ((p.x - left) / (right - left)) * (high - low), (p.y - top) / (bottom - top), high - low);
      if (!found) return leave();
      const x = left + ((found[0] - low) / (high - low)) * (right - left);
      line.setAttribute("d", `M${x} ${top}V${bottom}`);
      tip.textContent = found[1];
      tip.hidden = false;
      tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
      tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
    });
    svg.addEventListener("pointerdown", (event) => { from = place(event); });
    // A click makes the chart large; there, dragging shows the part that was dragged over.
    svg.addEventListener("pointerup", (event) => {
      const to = place(event), start = from;
      from = null;
      if (start && figure.matches(".zoomed") && Math.abs(to.x - start.x) > 8) {
        const height = Math.max(20, Math.abs(to.y - start.y));
        svg.setAttribute("viewBox", `${Math.min(start.x, to.x)} ${Math.min(start.y, to.y)} ${Math.abs(to.x - start.x)} ${height}`);
      } else if (svg.getAttribute("viewBox") !== home) {
        svg.setAttribute("viewBox", home);
      } else {
        figure.classList.toggle("zoomed");
      }
    });
  }
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelectorAll(".zoomed").forEach((figure) => figure.classList.remove("zoomed"));
});
