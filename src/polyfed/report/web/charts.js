// Charts: lines with bands over rounds, seconds or bytes; dots of seeds.

function steps(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough * 0.999);
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step)
    found.push(+v.toPrecision(12));
  return found;
}

function extent(values, floor) {
  let low = Infinity,
    high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (low > high) return [0, 1];
  if (floor != null) low = Math.min(low, floor);
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  return [
    low - (floor != null && low === floor ? 0 : (high - low) * 0.06),
    high + (high - low) * 0.06,
  ];
}

// Figures along an axis have as many decimals as the finest of them needs; sizes speak for themselves.
function rungLabels(rungs, y) {
  const places = Math.max(0, ...rungs.map(v => (String(v).split(".")[1] ?? "").length));
  return rungs.map(v => (y.unit == null ? y.format(v) : v.toFixed(Math.min(places, 6)) + y.unit));
}

// lines: [{name, colour, points: [[x, y], ...], band: [[x, low, high], ...], thin}]
function lineChart({ lines, x, y, high = 250, floor = null, most = null, label }) {
  const every = lines.flatMap(line => line.points);
  if (!every.length) return empty("Nothing to draw yet.");
  return drawn(width => {
    const right = 14,
      top = 8,
      bottom = 30;
    const ends = lines.flatMap(line => (line.band ?? []).flatMap(b => [b[1], b[2]]));
    let [low, high_] = extent([...every.map(p => p[1]), ...ends], floor);
    if (most != null) high_ = Math.min(high_, most);
    const rungs = steps(low, high_, 5),
      named = rungLabels(rungs, y),
      left = 16 + 6.2 * Math.max(...named.map(text => text.length));
    const xs = every.map(p => p[0]);
    let first = Math.min(...(xs.length > 5000 ? lines.map(l => l.points[0]?.[0] ?? Infinity) : xs));
    let last = Math.max(
      ...(xs.length > 5000 ? lines.map(l => l.points.at(-1)?.[0] ?? -Infinity) : xs),
    );
    if (first === last) {
      first -= 0.5;
      last += 0.5;
    }
    const X = v => left + ((v - first) / (last - first)) * (width - left - right);
    const Y = v => top + ((high_ - v) / (high_ - low)) * (high - top - bottom);
    const path = points =>
      points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
    const picture = sheetOf(width, high, label, "chart");
    for (const [i, v] of rungs.entries()) {
      picture.append(
        shape("line", { class: "grid", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }),
        shape("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, named[i]),
      );
    }
    for (const v of steps(first, last, Math.max(2, Math.floor((width - left) / 80))).filter(
      v => !x.whole || Number.isInteger(v),
    )) {
      picture.append(
        shape("text", { x: X(v), y: high - 12, "text-anchor": "middle" }, x.format(v)),
      );
    }
    picture.append(
      shape("line", {
        class: "axis",
        x1: left,
        x2: width - right,
        y1: high - bottom,
        y2: high - bottom,
      }),
    );
    for (const line of lines.filter(line => line.band?.length)) {
      const d =
        path(line.band.map(b => [b[0], b[2]])) +
        "L" +
        path(line.band.map(b => [b[0], b[1]]).reverse()).slice(1) +
        "Z";
      picture.append(shape("path", { d, fill: line.colour, "fill-opacity": line.shade ?? 0.14 }));
    }
    for (const line of [...lines].sort((a, b) => (b.thin ?? 0) - (a.thin ?? 0))) {
      if (line.points.length === 1) {
        picture.append(
          shape("circle", {
            cx: X(line.points[0][0]),
            cy: Y(line.points[0][1]),
            r: 3,
            fill: line.colour,
          }),
        );
      }
      picture.append(
        shape("path", {
          class: "curve",
          d: path(line.points),
          stroke: line.colour,
          "stroke-width": line.thin ? 1.1 : 2.2,
          "stroke-opacity": line.thin ? 0.55 : 1,
          "stroke-dasharray": line.dash,
        }),
      );
    }
    hover(picture, { lines, X, x, y, left, right, width, top, bottom, high, first, last });
    return picture;
  });
}

function hover(picture, { lines, X, x, y, left, right, width, top, bottom, high, first, last }) {
  const cross = shape("line", { class: "cross", y1: top, y2: high - bottom, visibility: "hidden" });
  picture.append(cross);
  picture.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    hideTip();
  });
  picture.addEventListener("pointermove", event => {
    const box = picture.getBoundingClientRect();
    const at =
      first +
      ((((event.clientX - box.left) * width) / box.width - left) / (width - left - right)) *
        (last - first);
    const near = lines
      .filter(line => line.points.length && line.name)
      .map(line => [line, nearest(line.points, at)]);
    if (!near.length) return;
    const best = near
      .map(([, p]) => p[0])
      .reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    cross.setAttribute("x1", X(best));
    cross.setAttribute("x2", X(best));
    cross.setAttribute("visibility", "visible");
    const shown = near
      .filter(([, p]) => !x.whole || p[0] === best)
      .sort((a, b) => b[1][1] - a[1][1])
      .slice(0, 14);
    showTip(
      event,
      el("b", {}, `${x.name} ${x.format(best)}`),
      el(
        "table",
        {},
        shown.map(([line, p]) =>
          el(
            "tr",
            {},
            el(
              "td",
              {},
              el("span", { class: "dot", style: `background:${line.colour}` }),
              line.name,
            ),
            el("td", {}, y.format(p[1])),
          ),
        ),
      ),
    );
  });
}

function nearest(points, at) {
  let low = 0,
    high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < at) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - at) <= Math.abs(points[high][0] - at)
    ? points[low]
    : points[high];
}

// rows: [{name, colour, values}]: a dot a seed, a bar at their mean.
function dotChart({ rows, name, format }) {
  return drawn(width => {
    const row = 30,
      left = Math.min(170, 16 + 7 * Math.max(...rows.map(r => r.name.length))),
      right = 18,
      top = 6;
    const high = top + row * rows.length + 30;
    const [low, most] = extent(rows.flatMap(r => r.values));
    const X = v => left + ((v - low) / (most - low)) * (width - left - right);
    const picture = sheetOf(width, high, name, "chart drawn");
    for (const v of steps(low, most, Math.max(2, Math.floor((width - left) / 70)))) {
      picture.append(
        shape("line", { class: "grid", x1: X(v), x2: X(v), y1: top, y2: high - 26 }),
        shape("text", { x: X(v), y: high - 10, "text-anchor": "middle" }, format(v)),
      );
    }
    const seeds = Math.max(...rows.map(r => r.values.length));
    for (const s of seeds > 1 && rows.length < 9 ? range(seeds) : []) {
      const d = rows
        .map((r, i) => [r.values[s], top + row * (i + 0.5)])
        .filter(p => p[0] != null)
        .map((p, i) => `${i ? "L" : "M"}${X(p[0])} ${p[1]}`)
        .join("");
      picture.append(shape("path", { class: "pairing", d }));
    }
    rows.forEach((r, i) => {
      const y = top + row * (i + 0.5);
      const short = r.name.length * 7 > left ? r.name.slice(0, 20) + "…" : r.name;
      picture.append(
        shape("text", { class: "name", x: left - 12, y: y + 4, "text-anchor": "end" }, short),
      );
      for (const v of r.values)
        picture.append(
          shape("circle", {
            cx: X(v),
            cy: y,
            r: 4.2,
            fill: r.colour,
            "fill-opacity": 0.45,
            ...tells(`${r.name}: ${format(v)}`),
          }),
        );
      if (r.values.length > 1)
        picture.append(
          shape("line", {
            x1: X(mean(r.values)),
            x2: X(mean(r.values)),
            y1: y - 9,
            y2: y + 9,
            stroke: r.colour,
            "stroke-width": 2.5,
          }),
        );
    });
    return picture;
  });
}
