// Who talked to whom in a round: nodes on a circle, a ring with its faults.

function circle(run) {
  const work = run.work;
  if (work.said || !work.patterns.some(p => p.ticks.some(([, sent]) => sent.length))) return null;
  const rounds = range(work.rounds.length).map(i => i + 1);
  const host = el("div");
  const draw = i => host.replaceChildren(drawn(width => drawCircle(run, rounds[i], width)));
  const key = `circle ${chosen.run}`;
  chosen.at[key] ??= Math.max(0, Math.min(rounds.length, run.faults[0]?.tick ?? rounds.length) - 1);
  const control = slider(key, rounds, "round", draw);
  draw(Math.min(chosen.at[key], rounds.length - 1));
  const list = run.faults.length
    ? el(
        "ul",
        { class: "events" },
        run.faults.slice(0, 40).map(f =>
          el(
            "li",
            {},
            el(
              "button",
              {
                type: "button",
                title: f.why ?? "",
                onclick: () => control.move(Math.max(0, Math.min(rounds.length, f.tick) - 1)),
              },
              el("b", {}, `round ${f.tick}`),
              ` ${f.node} ${f.fault}`,
            ),
          ),
        ),
      )
    : null;
  const more = run.all_faults > 40 ? said(`${run.all_faults - 40} more in faults.jsonl.`) : null;
  return el(
    "div",
    {},
    head(
      work.ring ? "The ring, and its faults" : "Who talked to whom",
      rounds.length > 1 && control,
    ),
    host,
    list,
    more,
  );
}

function drawCircle(run, round, width) {
  const work = run.work,
    p = patternOf(work, round),
    n = work.nodes;
  const around = work.ring ?? range(n),
    hubs = range(work.names.length).slice(n),
    isHub = i => i >= n;
  const high = Math.min(340, Math.max(240, width * 0.72)),
    R = high / 2 - 34,
    cx = width / 2,
    cy = high / 2;
  const place = {};
  const putAround = (names, far, first) =>
    names.forEach((name, i) => {
      const turn = (2 * Math.PI * i) / names.length + first;
      place[name] = [cx + far * Math.cos(turn), cy + far * Math.sin(turn), turn];
    });
  putAround(around, R, -Math.PI / 2);
  putAround(hubs, hubs.length > 1 ? R * 0.42 : 0, Math.PI / around.length - Math.PI / 2);
  const picture = sheetOf(width, high, `who talked to whom in round ${round}`);
  const dot = around.length > 40 ? 3 : around.length > 16 ? 6 : 13;
  if (work.ring) drawRing(picture, work.ring, p, place);
  for (const [a, b] of p.cut) if (!work.ring) picture.append(line(place[a], place[b], "cut"));
  const sent = p.ticks.flatMap(([, links], k) => links.map(link => [k, link]));
  const both = new Set(sent.map(([, [a, b]]) => `${a} ${b}`));
  sent.forEach(([k, [a, b]], i) => {
    const mutual = both.has(`${b} ${a}`);
    if (mutual && a > b) return;
    const name = mutual
      ? `${work.names[a]} and ${work.names[b]}`
      : `${work.names[a]} to ${work.names[b]}`;
    const way = work.ring ? route(work, p, a, b) : [a, b];
    way
      .slice(1)
      .forEach((to, j) =>
        picture.append(
          arrow(
            place[way[j]],
            place[to],
            dot + 3,
            work.ring ? 0.24 : 0,
            sent.length > 60,
            `tick ${k + 1}: ${name}`,
            mutual,
          ),
        ),
      );
    if (work.ring && sent.length <= 24)
      picture.append(orderOf(place[way[0]], place[way[1]], 0.24, i + 1));
  });
  for (const name of Object.keys(place).map(Number)) {
    const [x, y, turn] = place[name],
      isDead = name < n && !p.alive.includes(name);
    picture.append(
      shape("circle", {
        class: isDead ? "node dead" : "node",
        cx: x,
        cy: y,
        r: dot,
        ...tells(work.names[name] + (isDead ? " is away" : "")),
      }),
    );
    if (around.length > 40 && !isHub(name)) continue;
    const text = work.names[name],
      inside = dot > 10 && text.length <= 3;
    const far = inside || isHub(name) ? 0 : dot + 6,
      anchor =
        far === 0 || Math.abs(Math.cos(turn)) < 0.3
          ? "middle"
          : Math.cos(turn) > 0
            ? "start"
            : "end";
    picture.append(
      shape(
        "text",
        {
          class: inside ? "strong" : "name",
          x: x + far * Math.cos(turn),
          y: y + far * 1.3 * Math.sin(turn) + 4 + (isHub(name) && !inside ? dot + 10 : 0),
          "text-anchor": anchor,
          "pointer-events": "none",
        },
        text,
      ),
    );
  }
  return picture;
}

const isCut = (p, a, b) => p.cut.some(([c, d]) => (a === c && b === d) || (a === d && b === c));
const line = (a, b, kind) => shape("line", { class: kind, x1: a[0], y1: a[1], x2: b[0], y2: b[1] });

// The links of the ring among those alive; one that is cut is drawn so.
function drawRing(picture, ring, p, place) {
  const alive = ring.filter(i => p.alive.includes(i));
  alive.forEach((a, i) => {
    const b = alive[(i + 1) % alive.length];
    if (a !== b && !(alive.length === 2 && i))
      picture.append(line(place[a], place[b], isCut(p, a, b) ? "cut" : "link"));
  });
  for (const [a, b] of p.cut) {
    const [x, y] = [(place[a][0] + place[b][0]) / 2, (place[a][1] + place[b][1]) / 2];
    picture.append(
      shape("path", {
        d: `M${x - 5} ${y - 5}l10 10M${x + 5} ${y - 5}l-10 10`,
        stroke: "var(--bad)",
        "stroke-width": 2,
      }),
    );
  }
}

// The nodes that a message passes: one way round, or the shorter of two ways without a cut.
function route(work, p, a, b) {
  const alive = work.ring.filter(i => p.alive.includes(i)),
    n = alive.length;
  const walk = step => {
    const way = [a];
    while (way.at(-1) !== b && way.length <= n)
      way.push(alive[(alive.indexOf(way.at(-1)) + step + n) % n]);
    return way;
  };
  const ways = (work.topology === "ring" ? [1] : [1, -1])
    .map(walk)
    .filter(way => !way.slice(1).some((to, i) => isCut(p, way[i], to)));
  return ways.sort((v, w) => v.length - w.length)[0] ?? [a, b];
}

// Where an arrow from a to b bends: aside by a share of its length.
function bend(a, b, share) {
  const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
  return [(a[0] + b[0]) / 2 + dy * share, (a[1] + b[1]) / 2 - dx * share];
}

function arrow(a, b, gap, share, many, text, plain) {
  const [mx, my] = bend(a, b, share);
  const near = ([x, y]) => {
    const d = Math.hypot(mx - x, my - y) || 1;
    return [x + ((mx - x) / d) * gap, y + ((my - y) / d) * gap];
  };
  const [p, q] = [near(a), near(b)],
    turn = Math.atan2(q[1] - my, q[0] - mx);
  const tipAt = side =>
    `${(q[0] - 8 * Math.cos(turn + side)).toFixed(1)} ${(q[1] - 8 * Math.sin(turn + side)).toFixed(1)}`;
  const end = plain ? "" : `M${tipAt(0.45)}L${q[0].toFixed(1)} ${q[1].toFixed(1)}L${tipAt(-0.45)}`;
  return shape("path", {
    class: many ? "say many" : "say",
    d: `M${p[0].toFixed(1)} ${p[1].toFixed(1)}Q${mx.toFixed(1)} ${my.toFixed(1)} ${q[0].toFixed(1)} ${q[1].toFixed(1)}${end}`,
    ...tells(text),
  });
}

function orderOf(a, b, share, number) {
  const [x, y] = bend(a, b, share * 1.25);
  return shape("text", { x, y: y + 4, "text-anchor": "middle" }, number);
}
