// Draws one timeline with plotly and fades what its filters leave out. `figure`: {traces, rows, unit}, see interactive.py.
const BUTTONS = [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]]; // none that leaves this machine

const traceOf = ({ kind, name, colour, ...columns }) => ({
  ...columns, name, type: "bar", orientation: "h", meta: { kind }, hoverinfo: "text", textposition: "inside",
  insidetextanchor: "middle", textangle: 0, insidetextfont: { color: kind === "B" ? "#ffffff" : "#1f2932" },
  marker: {
    color: kind === "wait" ? "#e4e8ec" : colour,
    line: { width: kind === "wait" ? 0 : 0.5, color: "rgba(255,255,255,0.7)" },
  },
});

const layoutOf = ({ rows, unit }) => ({
  barmode: "overlay", bargap: 0.14, showlegend: false, hovermode: "closest", dragmode: "zoom",
  height: 90 + 30 * rows.length, margin: { l: 10, r: 10, t: 30, b: 45 },
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", modebar: { bgcolor: "rgba(0,0,0,0)" },
  uniformtext: { mode: "hide", minsize: 8 }, font: { family: "system-ui, sans-serif", size: 12 },
  hoverlabel: { align: "left" }, xaxis: { title: { text: `time (${unit})` }, zeroline: false },
  yaxis: {
    categoryorder: "array", categoryarray: rows, autorange: "reversed", fixedrange: true, automargin: true,
    showgrid: false,
  },
});

function drawTimeline(frame, figure) {
  const data = figure.traces.map(traceOf);
  const plot = frame.querySelector(".plot");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colours = () => {
    const style = getComputedStyle(frame);
    const [ink, muted, line, wait] = ["--ink", "--muted", "--line", "--wait"].map((name) => style.getPropertyValue(name).trim());
    return { ink: ink || "#1f2933", muted: muted || "#66727f", line: line || "#b8c1ca", wait: wait || "#e4e8ec" };
  };
  const themed = () => {
    const { ink, muted, line } = colours();
    return {
      "font.color": ink, "xaxis.gridcolor": line, "xaxis.linecolor": line, "xaxis.tickfont.color": muted,
      "yaxis.tickfont.color": ink, "modebar.color": muted, "modebar.activecolor": ink,
    };
  };
  const waits = data.flatMap((trace, index) => (trace.meta.kind === "wait" ? [index] : []));
  const paint = () => {
    Plotly.relayout(plot, themed());
    if (waits.length) Plotly.restyle(plot, { "marker.color": colours().wait }, waits);
  };
  const options = { responsive: true, displaylogo: false, scrollZoom: true, modeBarButtons: BUTTONS };
  Plotly.newPlot(plot, data, layoutOf(figure), options).then(paint);
  dark.addEventListener("change", paint);
  // What is folded away has no width when it is drawn.
  frame.closest("details")?.addEventListener("toggle", () => Plotly.Plots.resize(plot));

  const chosen = (name) => frame.querySelector(`select[name=${name}]`).value;
  const fade = () => {
    const [kind, microBatch, slice] = [chosen("kind"), chosen("micro_batch"), chosen("slice")];
    const opacities = data.map((trace) =>
      trace.customdata.map(([m, s]) =>
        (kind === "" || kind === trace.meta.kind) && (microBatch === "" || microBatch === String(m)) &&
        (slice === "" || slice === String(s)) ? 1 : 0.1));
    Plotly.restyle(plot, { "marker.opacity": opacities });
  };
  frame.querySelectorAll("select").forEach((select) => select.addEventListener("change", fade));
}

// The library is packed, which makes the page less than half as large.
async function unpackLibrary(packed) {
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

document.addEventListener("DOMContentLoaded", async () => {
  const text = (id) => document.getElementById(id).textContent;
  await unpackLibrary(text("plotly-packed"));
  document.querySelectorAll(".interactive").forEach((frame) => drawTimeline(frame, JSON.parse(text(frame.dataset.figure))));
});
