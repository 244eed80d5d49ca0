// Who worked when: nodes down, ticks across.

const patternOf = (work, round) => work.patterns[work.rounds[round - 1]];

function timeline(run) {
  const work = run.work;
  if (work.said) return empty(work.said);
  if (!work.rounds.length) return empty("No round is over yet.");
  const rows = work.names.length,
    rounds = work.rounds.length;
  const longest = Math.max(1, ...work.patterns.map(p => p.ticks.length));
  const host = el("div", { class: "scroll" });
  const draw = from =>
    host.replaceChildren(
      drawn(width => {
        const row = Math.max(5, Math.min(28, 460 / rows));
        const fit = Math.max(
          1,
          Math.floor(
            Math.min((width - 108) / (longest * (longest > 1 ? 17 : 30)), 4000 / (rows * longest)),
          ),
        );
        const strips = Math.max(
          1,
          Math.min(4, Math.floor(400 / (rows * row + 44)), Math.ceil(rounds / fit)),
        );
        const start = Math.min(from, Math.max(1, rounds - fit * strips + 1));
        return el(
          "div",
          {},
          range(strips)
            .map(k => start + k * fit)
            .filter(first => first <= rounds)
            .map(first =>
              drawTimeline(
                run,
                first,
                Math.min(fit, rounds - first + 1),
                strips > 1 ? fit * longest : 8,
                row,
                width,
              ),
            ),
        );
      }),
    );
  const starts = range(rounds).map(i => i + 1);
  const key = `timeline ${chosen.run}`;
  chosen.at[key] ??= 0;
  const control = slider(key, starts, "from round", i => draw(starts[i]));
  draw(starts[chosen.at[key]]);
  const cutShort =
    rounds < work.of ? `Rounds after ${rounds} are not drawn: the page would be too large. ` : "";
  return el(
    "div",
    {},
    head("Who trained when, and what crossed after it", rounds > 1 && control),
    host,
    said(
      `${cutShort}A block is a node that trains, a line a message; ${longest > 1 ? `a round of ${work.topology} has up to ${longest} ticks` : "a round is one tick: everybody trains at the same time"}.`,
    ),
  );
}

function drawTimeline(run, from, count, columns, row, width) {
  const work = run.work,
    rows = work.names.length,
    top = 34;
  const left = Math.min(100, 24 + 7 * Math.max(...work.names.map(name => name.length)));
  const shown = range(count).map(i => from + i);
  const ticks = shown.flatMap(round =>
    patternOf(work, round).ticks.map((tick, k) => ({ round, k, tick })),
  );
  const wide = Math.min(64, (width - left - 8) / Math.max(ticks.length, columns));
  const high = top + rows * row + 8,
    block = wide * 0.5;
  const picture = sheetOf(width, high, "who worked when");
  const Y = i => top + (i + 0.5) * row;
  const every = Math.ceil(11 / row);
  work.names.forEach((name, i) => {
    if (i % every) return;
    picture.append(
      shape(
        "text",
        { class: "name", x: left - 10, y: Y(i) + 4, "text-anchor": "end" },
        name.length > 11 ? name.slice(0, 10) + "…" : name,
      ),
    );
  });
  let x = left;
  for (const round of shown) {
    const p = patternOf(work, round),
      span = p.ticks.length * wide;
    if (round % 2)
      picture.append(
        shape("rect", { class: "odd", x, y: top - 4, width: span, height: rows * row + 8 }),
      );
    for (const i of range(work.nodes)) {
      if (!p.alive.includes(i))
        picture.append(
          shape("rect", {
            class: "away",
            x,
            y: Y(i) - row / 2,
            width: span,
            height: row,
            ...tells(`round ${round}: ${work.names[i]} is away`),
          }),
        );
    }
    const skip = Math.ceil(20 / Math.max(1, span));
    if ((round - from) % skip === 0)
      picture.append(shape("text", { x: x + span / 2, y: 14, "text-anchor": "middle" }, round));
    const faults = run.faults.filter(f => f.tick === round);
    if (faults.length) {
      const text = faults.map(f => `${f.node} ${f.fault}`).join(", ");
      picture.append(
        shape("path", {
          class: "flag",
          d: `M${x + span / 2 - 5} 19h10l-5 8z`,
          ...tells(`round ${round}: ${text}`),
        }),
      );
    }
    x += span;
  }
  ticks.forEach(({ round, tick: [active, sent] }, column) => {
    const x = left + column * wide;
    picture.append(
      shape("path", {
        class: sent.length > 60 ? "say many" : "say",
        d: messages(sent, x + 2 + block, wide - block - 2, Y, work.nodes),
      }),
    );
    for (const i of active) {
      picture.append(
        shape("rect", {
          class: "block",
          x: x + 2,
          y: Y(i) - Math.min(row, 18) * 0.38,
          width: block,
          height: Math.min(row, 18) * 0.76,
          rx: Math.min(3, row / 4),
          ...tells(`round ${round}: ${work.names[i]} trains`),
        }),
      );
    }
  });
  return picture;
}

// Two nodes that exchange are joined by a bar of their own; other messages go one by one.
function messages(sent, x, wide, Y, nodes) {
  const all = new Set(sent.map(([a, b]) => `${a} ${b}`));
  const isPair = ([a, b]) => a < nodes && b < nodes && all.has(`${b} ${a}`);
  const pairs = sent.filter(link => isPair(link) && link[0] < link[1]);
  const bars = pairs.map(([a, b], i) => {
    const at = (x + (wide * (i + 1)) / (pairs.length + 1)).toFixed(1);
    return `M${at} ${Y(a).toFixed(1)}m-2 0h4m-2 0V${Y(b).toFixed(1)}m-2 0h4`;
  });
  return (
    bars.join("") +
    sent
      .filter(link => !isPair(link))
      .map(link => message(link, x, wide, Y, nodes))
      .join("")
  );
}

// To a hub in the first half of the gap, from it in the second; between nodes all the way.
function message([a, b], x, wide, Y, nodes) {
  const [start, end] = b >= nodes ? [0, 0.5] : a >= nodes ? [0.5, 1] : [0, 1];
  return `M${(x + start * wide).toFixed(1)} ${Y(a).toFixed(1)}L${(x + end * wide).toFixed(1)} ${Y(b).toFixed(1)}`;
}
