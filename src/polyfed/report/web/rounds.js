// Curves by round: of methods, of every node, of one node.

const AXES = {
  round: { name: "round", format: v => figure(v), whole: true },
  seconds: { name: "after", format: seconds, whole: false },
  bytes: { name: "after", format: size, whole: false },
};

const kept = (run, values) => (run.kept ? run.kept.map(i => values[i]) : values);

function along(run) {
  if (chosen.x === "round") return kept(run, run.ticks);
  let sum = 0;
  return kept(
    run,
    run[chosen.x].map(v => (sum += v)),
  );
}

const visible = () => labels().filter(label => !chosen.hidden.has(label));
const runsOf = label => data.runs.filter(r => r.label === label);
const points = (xs, ys) => xs.map((x, i) => [x, ys[i]]).filter(p => p[1] != null);
const column = (rows, i) => there(rows.map(row => row[i]));
const averaged = rows =>
  range(Math.max(0, ...rows.map(r => r.length))).map(i => {
    const v = column(rows, i);
    return v.length ? mean(v) : null;
  });

function bandOf(xs, rows, low, high) {
  return xs
    .map((x, i) => {
      const v = column(rows, i).sort((a, b) => a - b);
      return v.length > 1 ? [x, low(v), high(v)] : null;
    })
    .filter(Boolean);
}

// Lines of a figure for what is chosen: means of methods, every node, or one node.
function curves(name) {
  const lines = [],
    view = chosen.view,
    alone = labels().length === 1;
  for (const label of visible()) {
    const runs = runsOf(label).filter(r => r.series[name]),
      tone = colourOf(label);
    if (!runs.length) continue;
    const xs = averaged(runs.map(along));
    const rowsOf = run =>
      Object.entries(run.series[name])
        .filter(([n]) => view === "mean" || view === "nodes" || n === view)
        .map(([, row]) => row);
    const means = runs.map(run => averaged(rowsOf(run)));
    const name_ = alone ? (view === "mean" || view === "nodes" ? "mean" : view) : label;
    const line = {
      name: name_,
      colour: alone && view === "nodes" ? "var(--ink)" : tone,
      points: points(xs, averaged(means)),
    };
    if (runs.length > 1)
      line.band = bandOf(
        xs,
        means,
        v => mean(v) - spread(v),
        v => mean(v) + spread(v),
      );
    lines.push(line);
    if (view === "nodes") lines.push(...nodeLines(runs, name, xs, tone, alone));
  }
  return lines;
}

function nodeLines(runs, name, xs, tone, alone) {
  const nodes = [...new Set(runs.flatMap(r => Object.keys(r.series[name])))];
  const row = n => averaged(runs.map(r => r.series[name][n]).filter(Boolean));
  if (nodes.length > 20) {
    const rows = nodes.map(row),
      at = share => v => quantile(v, share);
    return [
      [0, 1, "lowest and highest", 0.1],
      [0.1, 0.9, "middle 80%", 0.16],
    ].map(([low, high, , shade]) => ({
      name: "",
      colour: tone,
      points: [],
      band: bandOf(xs, rows, at(low), at(high)),
      shade,
    }));
  }
  return nodes.map((n, i) => ({
    name: alone ? n : `${labels().length > 1 ? runs[0].label + " " : ""}${n}`,
    colour: alone ? colour(i) : tone,
    thin: 1,
    points: points(xs, row(n)),
  }));
}

function roundsSection(id, title) {
  const runs = data.runs,
    nodes = [...new Set(runs.flatMap(r => r.nodes))];
  chosen.view ??= runs.length === 1 && nodes.length > 1 ? "nodes" : "mean";
  const bar = el(
    "div",
    { class: "head" },
    labels().length > 1 ? chips(id) : legend(),
    el("span", { class: "grow" }),
    ...switches(id, nodes),
  );
  return sectionOf(
    id,
    title,
    "",
    bar,
    el(
      "div",
      { class: "pair" },
      card(head("Test accuracy"), figureChart("test_accuracy")),
      otherFigure(id),
    ),
    said(shading(nodes)),
  );
}

function chips(id) {
  const toggle = label => {
    if (!chosen.hidden.delete(label)) chosen.hidden.add(label);
    again(id, "cost");
  };
  return el(
    "span",
    { class: "chips" },
    labels().map(label => {
      const state = {
        "aria-pressed": String(!chosen.hidden.has(label)),
        onclick: () => toggle(label),
      };
      return el("button", { class: "chip", type: "button", ...state }, dot(label), label);
    }),
  );
}

// Mean, every node or one of them; over rounds, seconds or bytes.
function switches(id, nodes) {
  const one = [["", "one node…"], ...nodes.slice(0, 400).map(n => [n, n])],
    is = nodes.includes(chosen.view) ? chosen.view : "";
  return [
    choice(
      [
        ["mean", "mean"],
        ["nodes", "every node"],
      ],
      chosen.view,
      put("view", id),
    ),
    nodes.length > 1 && select(one, is, value => put("view", id)(value || "mean"), "Node"),
    choice(
      [
        ["round", "rounds"],
        ["seconds", "seconds"],
        ["bytes", "bytes"],
      ],
      chosen.x,
      put("x", id),
    ),
  ];
}

function figureChart(name) {
  const most = name.includes("accuracy") ? 1 : null;
  return lineChart({
    lines: curves(name),
    x: AXES[chosen.x],
    y: { format: figure, unit: "" },
    most,
    label: `${name} by ${chosen.x}`,
  });
}

function otherFigure(id) {
  const names = [...new Set(data.runs.flatMap(r => Object.keys(r.series)))].filter(
    n => n !== "test_accuracy",
  );
  if (!names.length) return card(empty("No other figure was noted."));
  const usual = ["local_loss", ...names.filter(n => n.endsWith("_loss")), names[0]];
  if (!names.includes(chosen.loss)) chosen.loss = usual.find(n => names.includes(n));
  const options = names.map(n => [n, n.replaceAll("_", " ")]);
  return card(
    head(capital(chosen.loss), select(options, chosen.loss, put("loss", id), "Figure")),
    figureChart(chosen.loss),
  );
}

function shading(nodes) {
  if (chosen.view === "nodes" && nodes.length > 20) {
    return "Shaded: the middle 80% of the nodes, and from the lowest to the highest; the line is their mean.";
  }
  const several = labels().length > 1 && data.title.seeds.length > 1;
  return several ? "Lines are means over seeds, shades a standard deviation to both sides." : "";
}

// The colours of nodes, where one run shows each of them.
function legend() {
  const nodes = data.runs[0].nodes;
  if (chosen.view !== "nodes" || nodes.length > 20 || nodes.length < 2) return el("span");
  const tones = Object.keys(data.runs[0].series.test_accuracy ?? {});
  return el(
    "span",
    { class: "chips" },
    [["mean", "var(--ink)"], ...tones.map((n, i) => [n, colour(i)])].map(([n, tone]) =>
      key(tone, n),
    ),
  );
}
