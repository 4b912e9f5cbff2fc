// Charts are drawn when they come into view: a page of 25 tables opens at once.
const style = getComputedStyle(document.documentElement);
const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();

function draw(figure) {
  if (figure.dataset.drawn) return;
  figure.dataset.drawn = "yes";
  const chart = JSON.parse(figure.querySelector("script").textContent);
  Object.assign(chart.layout, { paper_bgcolor: "transparent", plot_bgcolor: "transparent" });
  chart.layout.font = { color: ink, family: "system-ui, sans-serif", size: 12 };
  for (const [key, axis] of Object.entries(chart.layout)) {
    if (/^[xy]axis/.test(key)) Object.assign(axis, { gridcolor: line, zerolinecolor: line, linecolor: line });
  }
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" };
  Plotly.newPlot(figure.querySelector("div"), chart.data, chart.layout, config);
}

const figures = document.querySelectorAll("figure");
const watcher = new IntersectionObserver(
  (entries) => entries.filter((e) => e.isIntersecting).forEach((e) => { watcher.unobserve(e.target); draw(e.target); }),
  { rootMargin: "600px" });
figures.forEach((figure) => watcher.observe(figure));
addEventListener("beforeprint", () => figures.forEach(draw));
