(() => {
  "use strict";
  const MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "cross"];
  const WAYS = { contributed: "--good", missing: "--lost", "left out": "--aside" };
  const UNITS = { rounds: "", forwards: "", bytes: "B", seconds: " s" };
  let data = JSON.parse(document.getElementById("data").textContent);
  let axis = "rounds";

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColour = (run) => colour(`--run-${run % MARKERS.length}`);
  const phone = () => window.innerWidth < 560;

  // Plotly reads some HTML in texts; names are a stranger's, and are drawn as they are.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function shown(value, percent) {
    if (value === null || value === undefined) return "–";
    if (percent) return `${(100 * value).toFixed(2)}%`;
    const whole = Number.isInteger(value);
    return value.toLocaleString("en", whole ? {} : { maximumSignificantDigits: 5 });
  }

  // What is drawn as one line: the points that have both numbers, and how the line looks.
  function linesOf(chart) {
    const lines = [];
    for (const line of data.lines) {
      const last = `${chart.column}_last`;
      const same = line[last] && line[last].every((value, i) => value === line[chart.column][i]);
      for (const [column, dots] of [[chart.column, false], [last, true]]) {
        if (!line[column] || !line[axis] || (dots && same)) continue;
        const kept = line[column].map((_, i) => i).filter((i) => line[column][i] !== null && line[axis][i] !== null);
        const name = dots ? `${line.name}, without averaging` : line.name;
        const style = dots ? "dot" : line.dash ? "dash" : "solid";
        const at = (values) => values && kept.map((i) => values[i]);
        const range = [at(line[`${column}_least`]), at(line[`${column}_most`])];
        lines.push({ name, style, run: line.run, x: at(line[axis]), y: at(line[column]), range });
      }
    }
    return lines.filter((line) => line.x.length);
  }

  function lineTraces(chart) {
    const few = chart.column !== "loss";
    const bands = linesOf(chart).filter((line) => line.range[0]).flatMap((line) => line.range.map((y, i) => ({
      type: "scatter", mode: "lines", x: line.x, y, line: { width: 0, color: runColour(line.run) }, hoverinfo: "skip",
      fill: i ? "tonexty" : "none", fillcolor: `${runColour(line.run)}33`,
    })));
    return bands.concat(linesOf(chart).map((line) => ({
      type: "scatter", name: plain(line.name), x: line.x, y: line.y,
      mode: line.x.length === 1 ? "markers" : few && line.style === "solid" ? "lines+markers" : "lines",
      opacity: line.style === "dot" ? 0.75 : 1,
      line: { color: runColour(line.run), width: line.style === "dot" ? 1.5 : 2.25, dash: line.style },
      marker: { color: runColour(line.run), size: 6, symbol: MARKERS[line.run % MARKERS.length] },
      hovertemplate: chart.percent ? "%{y:.2%}" : "%{y:.4~g}",
    })));
  }

  function barTraces(chart) {
    return chart.bars.map((bar, i) => {
      const paint = colour(bar.way ? WAYS[bar.way] : ["--up", "--down"][i % 2]);
      const groups = chart.groups.map((name) => plain(name).replace(", ", ",<br>"));
      const [x, y] = chart.horizontal ? [bar.values, groups] : [groups, bar.values];
      return {
        type: "bar", name: bar.name, x, y, orientation: chart.horizontal ? "h" : "v", marker: { color: paint },
        text: chart.horizontal ? bar.values.map((value) => shown(value)) : undefined,
        textposition: "outside", constraintext: "none", cliponaxis: false, textangle: 0,
        hovertemplate: chart.horizontal ? `${bar.name}: %{x:,} bytes<extra></extra>` : "%{y}",
      };
    });
  }

  function heatTraces(chart) {
    return [{
      type: "heatmap", z: chart.values, x: chart.columns, y: chart.rows, xgap: 2, ygap: 2, showscale: true,
      colorbar: {
        title: { text: chart.scale, side: "right", font: { color: colour("--muted") } }, tickfont: { color: colour("--muted") },
        thickness: phone() ? 8 : 12, outlinewidth: 0, nticks: 5,
      },
      colorscale: [[0, colour("--heat")], [1, runColour(0)]], zmin: 0,
      hovertemplate: `${chart.row} %{y}, ${chart.column} %{x}: %{z} samples<extra></extra>`,
    }];
  }

  function layoutOf(chart) {
    const line = {
      gridcolor: colour("--rule"), zerolinecolor: colour("--rule"), linecolor: colour("--rule"), automargin: true,
      tickfont: { color: colour("--muted") }, title: { font: { color: colour("--muted"), size: 13 }, standoff: 12 },
      fixedrange: true,
    };
    const titled = (text, more) => ({ ...line, ...more, title: { ...line.title, text } });
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--text") },
      margin: { l: 8, r: 12, t: 10, b: 8 }, hovermode: "x unified",
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--rule"), font: { color: colour("--text") } },
    };
    const key = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: colour("--text") } };
    if (chart.kind === "lines") {
      layout.xaxis = titled(data.axes[axis], { ticksuffix: UNITS[axis], showgrid: false, nticks: phone() ? 4 : 7 });
      layout.xaxis.exponentformat = "SI";
      layout.yaxis = titled("", { tickformat: chart.percent ? ".1~%" : "", rangemode: "normal" });
    } else if (chart.kind === "bars" && chart.horizontal) {
      Object.assign(layout, { hovermode: "closest", showlegend: true, legend: { ...key, traceorder: "normal" }, bargap: 0.35 });
      layout.xaxis = titled("", { ticksuffix: "B", exponentformat: "SI", nticks: phone() ? 3 : 7, tickangle: 0 });
      layout.yaxis = titled("", { autorange: "reversed", showgrid: false });
      layout.margin.r = 56;
    } else if (chart.kind === "bars") {
      const several = chart.bars.length > 1;
      Object.assign(layout, { barmode: "stack", bargap: 0.15, showlegend: several, legend: { ...key, traceorder: "normal" } });
      layout.xaxis = titled(chart.group, { type: "category", showgrid: false, nticks: phone() ? 4 : 10, tickangle: 0 });
      layout.yaxis = titled("", { rangemode: "tozero" });
    } else {
      Object.assign(layout, { hovermode: "closest" });
      layout.xaxis = titled(chart.column, { type: "category", showgrid: false, nticks: phone() ? 6 : 20, tickangle: 0 });
      layout.yaxis = titled(chart.row, { type: "category", autorange: "reversed", showgrid: false, nticks: 12 });
    }
    return layout;
  }

  function draw(chart) {
    const place = document.getElementById(chart.id);
    if (!place) return;
    if (!window.Plotly) {
      place.className = "plot missing";
      place.textContent = `No drawing: ${document.body.dataset.script || "the script"} is missing. The numbers are below.`;
    } else {
      const traces = { lines: lineTraces, bars: barTraces, heat: heatTraces }[chart.kind](chart);
      Plotly.react(place, traces, layoutOf(chart), { displayModeBar: false, responsive: true });
    }
    const details = place.parentElement.querySelector("details");
    if (details.open) fill(details, chart);
    details.ontoggle = () => details.open && fill(details, chart);
  }

  // The same numbers as a table. All text goes in as text, never as HTML.
  function tableOf(chart) {
    if (chart.kind === "heat") {
      const head = [chart.row, ...chart.columns.map((name) => `${chart.column} ${name}`)];
      return [head, chart.rows.map((name, i) => [name, ...chart.values[i].map((value) => shown(value))])];
    }
    if (chart.kind === "bars") {
      const head = [chart.group, ...chart.bars.map((bar) => bar.name)];
      return [head, chart.groups.map((name, i) => [name, ...chart.bars.map((bar) => shown(bar.values[i]))])];
    }
    const lines = linesOf(chart);
    const places = [...new Set(lines.flatMap((line) => line.x))].sort((one, other) => one - other);
    const found = lines.map((line) => new Map(line.x.map((x, i) => [x, line.y[i]])));
    const rows = places.map((x) => [shown(x), ...found.map((values) => shown(values.get(x), chart.percent))]);
    return [[data.axes[axis], ...lines.map((line) => line.name)], rows];
  }

  function fill(details, chart) {
    const [head, rows] = tableOf(chart);
    const table = document.createElement("table");
    const row = (parent, cells, tag) => {
      const line = parent.insertRow();
      cells.forEach((text, i) => {
        const cell = document.createElement(i && tag === "td" ? "td" : "th");
        cell.scope = tag === "td" ? "row" : "col";
        if (i) cell.className = "number";
        cell.textContent = text;
        line.append(cell);
      });
    };
    row(table.createTHead(), head, "th");
    const body = table.createTBody();
    rows.forEach((cells) => row(body, cells, "td"));
    details.querySelector(".scroll").replaceChildren(table);
  }

  function drawAll() {
    data.charts.forEach(draw);
    const ruler = document.getElementById("js-plotly-tester"); // Plotly measures texts in it, far outside the window
    if (ruler) ruler.setAttribute("aria-hidden", "true");
  }

  document.addEventListener("change", (event) => {
    if (event.target.name !== "axis") return;
    axis = event.target.value;
    data.charts.filter((chart) => chart.kind === "lines").forEach(draw);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();

  // A live page asks for what has changed. A part of the page is only replaced if it reads differently now.
  const live = document.body.dataset.live;
  if (!live) return;
  function show(fresh) {
    for (const [name, html] of Object.entries(fresh.parts)) {
      const part = document.getElementById(`part-${name}`);
      if (!part || data.parts[name] === html) continue;
      const open = new Set([...part.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
      part.innerHTML = html;
      part.querySelectorAll("summary").forEach((summary) => {
        summary.parentElement.open = open.has(summary.textContent);
      });
    }
    data = fresh;
    const chosen = document.querySelector(`input[name=axis][value=${axis}]`);
    if (chosen) chosen.checked = true;
    drawAll();
  }
  async function poll() {
    const note = document.getElementById("live");
    try {
      const answer = await fetch(live, { cache: "no-store" });
      if (!answer.ok) throw new Error(await answer.text());
      show(await answer.json());
      const says = data.over ? "The run has ended." : "Live.";
      if (note.textContent !== says) note.textContent = says;
    } catch (fault) {
      note.textContent = `Not live at the moment: ${fault.message || fault}`;
    }
    setTimeout(poll, data.over ? 10000 : 2000);
  }
  data.parts = data.parts || {};
  setTimeout(poll, 1000);
})();
