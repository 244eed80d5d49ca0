// What methods have of their own: matrices between nodes, maps of samples, two losses.

// ---- a matrix between nodes, by round ----------------------------------------------------------

const MATRICES = {
  utilities: ["Utilities", "How much each node (row) took from each other one (column)."],
  distances: [
    "Distances between triangles",
    "How far the correlations of two nodes' features are apart; what is blue is far.",
  ],
  relation: ["Relation of tasks", "How the hub says that tasks depend on each other."],
};

function matrix(found) {
  const [title, about] = MATRICES[found.name] ?? [found.name.replaceAll("_", " "), ""];
  const rounds = found.rounds.map(entry => entry.tick);
  const off = found.rounds.flatMap(e =>
    e.rows.flatMap((row, i) => there(row.filter((_, j) => i !== j))),
  );
  const ends = off.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const kept =
    found.of > rounds.length
      ? ` ${rounds.length} of ${found.of} rounds are kept in this page.`
      : "";
  if (rounds.length > 1 && rounds.length <= 10 && found.rounds[0].nodes.length <= 6) {
    const tiles = found.rounds.map(entry =>
      el(
        "div",
        {},
        el("h4", {}, `round ${entry.tick}`),
        drawMatrix(entry, ends, marginOf(entry.nodes) + 50 * entry.nodes.length + 4),
      ),
    );
    return card(head(title), el("div", { class: "tiles" }, tiles), said(about + kept));
  }
  const host = el("div", { class: "scroll" });
  const draw = i => host.replaceChildren(drawn(width => drawMatrix(found.rounds[i], ends, width)));
  const key = `matrix ${found.name} ${chosen.run}`;
  const control = slider(key, rounds, "round", draw);
  draw(Math.min(chosen.at[key] ?? rounds.length - 1, rounds.length - 1));
  return card(head(title, rounds.length > 1 && control), host, said(about + kept));
}

const marginOf = nodes => Math.min(96, 18 + 7 * Math.max(...nodes.map(name => name.length)));

function drawMatrix({ nodes, rows }, [low, high], width) {
  const n = nodes.length,
    left = marginOf(nodes);
  const cell = Math.max(4, Math.min(58, (Math.min(width, 620) - left - 4) / n)),
    top = 24;
  const tall = Math.max(4, Math.min(cell, 40)),
    all = top + n * tall + 6;
  const picture = sheetOf(left + n * cell + 4, all, "matrix between nodes");
  const every = Math.ceil(14 / tall),
    across = Math.ceil(34 / cell);
  nodes.forEach((name, i) => {
    const short = name.length > 10 ? name.slice(0, 9) + "…" : name,
      narrow = Math.floor((cell * across) / 6.6);
    if (i % every === 0)
      picture.append(
        shape(
          "text",
          { class: "name", x: left - 8, y: top + (i + 0.5) * tall + 4, "text-anchor": "end" },
          short,
        ),
      );
    if (i % across === 0)
      picture.append(
        shape(
          "text",
          { x: left + (i + 0.5) * cell, y: 14, "text-anchor": "middle" },
          name.length > narrow ? name.slice(0, narrow - 1) + "…" : name,
        ),
      );
  });
  rows.forEach((row, i) =>
    row.forEach((value, j) => {
      if (i === j || value == null) return;
      const share = high > low ? (value - low) / (high - low) : 0.5,
        mix = Math.round(6 + 88 * share);
      picture.append(
        shape("rect", {
          x: left + j * cell + 1,
          y: top + i * tall + 1,
          width: Math.max(1, cell - 2),
          height: Math.max(1, tall - 2),
          rx: cell > 14 ? 3 : 0,
          style: `fill:color-mix(in oklab, var(--accent) ${mix}%, var(--card))`,
          ...tells(`${nodes[i]} from ${nodes[j]}: ${figure(value)}`),
        }),
      );
      if (cell >= 40)
        picture.append(
          shape(
            "text",
            {
              x: left + (j + 0.5) * cell,
              y: top + (i + 0.5) * tall + 4,
              "text-anchor": "middle",
              "pointer-events": "none",
              style: `fill:var(${share > 0.5 ? "--on" : "--ink"})`,
            },
            figure(value),
          ),
        );
    }),
  );
  return picture;
}

// ---- a map of samples ---------------------------------------------------------------------------

const TONES = 8; // from the ninth group on the colours come again, hollow

function scatter(panel) {
  const isHollow = g => Math.floor(g / TONES) % 2 === 1;
  const picture = drawn(width => {
    const side = Math.min(width, 360),
      pad = 8,
      S = v => pad + v * (side - 2 * pad);
    const drawing = sheetOf(side, side, panel.title);
    panel.x.forEach((x, i) => {
      const g = panel.groups[i],
        hollow = isHollow(g);
      drawing.append(
        shape("circle", {
          cx: S(x).toFixed(1),
          cy: S(1 - panel.y[i]).toFixed(1),
          r: hollow ? 2.6 : 3,
          fill: hollow ? "none" : colour(g),
          stroke: colour(g),
          "stroke-width": hollow ? 1.4 : 0,
          "fill-opacity": 0.75,
          ...tells(panel.names[g]),
        }),
      );
    });
    return drawing;
  });
  const used = [...new Set(panel.groups)].sort((a, b) => a - b);
  const keys = used.map(g =>
    el(
      "span",
      {},
      el("span", {
        class: "dot",
        style: isHollow(g) ? `border:2px solid ${colour(g)}` : `background:${colour(g)}`,
      }),
      panel.names[g],
    ),
  );
  return el("div", {}, picture, el("div", { class: "keys" }, keys));
}

// ---- two losses against each other --------------------------------------------------------------

// points: [{name, x, y, colour}]; those that no other beats in both are joined.
function frontChart(points, xName, yName) {
  return drawn(width => {
    const left = 58,
      right = 20,
      top = 12,
      bottom = 40,
      high = 300;
    const [x0, x1] = extent(points.map(p => p.x)),
      [y0, y1] = extent(points.map(p => p.y));
    const X = v => left + ((v - x0) / (x1 - x0)) * (width - left - right),
      Y = v => top + ((y1 - v) / (y1 - y0)) * (high - top - bottom);
    const picture = sheetOf(width, high, `${yName} against ${xName}`, "chart");
    const up = steps(y0, y1, 5),
      along = steps(x0, x1, 5),
      names = [rungLabels(up, { unit: "" }), rungLabels(along, { unit: "" })];
    for (const [i, v] of up.entries())
      picture.append(
        shape("line", { class: "grid", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }),
        shape("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, names[0][i]),
      );
    for (const [i, v] of along.entries())
      picture.append(
        shape("text", { x: X(v), y: high - 24, "text-anchor": "middle" }, names[1][i]),
      );
    picture.append(
      shape(
        "text",
        { x: (left + width) / 2, y: high - 6, "text-anchor": "middle" },
        `${xName} →   (up: ${yName})`,
      ),
    );
    const front = points
      .filter(p => !points.some(o => o.x <= p.x && o.y <= p.y && (o.x < p.x || o.y < p.y)))
      .sort((a, b) => a.x - b.x);
    picture.append(
      shape("path", {
        class: "curve",
        stroke: "var(--quiet)",
        "stroke-dasharray": "4 4",
        d: front.map((p, i) => `${i ? "L" : "M"}${X(p.x)} ${Y(p.y)}`).join(""),
      }),
    );
    for (const p of points) {
      picture.append(
        shape("circle", {
          cx: X(p.x),
          cy: Y(p.y),
          r: 5.5,
          fill: front.includes(p) ? p.colour : "var(--card)",
          stroke: p.colour,
          "stroke-width": 2,
          ...tells(`${p.name}: ${figure(p.x)}, ${figure(p.y)}`),
        }),
      );
    }
    return picture;
  });
}
