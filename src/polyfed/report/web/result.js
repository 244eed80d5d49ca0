// The result: sentences on noise, a table of nodes or of methods; and what it cost.

function resultSection(id, title) {
  const { rows, verdicts } = data.headline;
  const list = el(
    "ul",
    { class: "verdicts" },
    verdicts.map(v => el("li", { class: v.word }, v.text)),
  );
  if (data.runs.length === 1) {
    const about = current().about;
    return sectionOf(
      id,
      title,
      about && `${current().method}: ${about}`,
      card(list, runTable(current())),
    );
  }
  const dots = card(
    head("Mean accuracy of every seed"),
    dotChart({
      rows: rows
        .filter(r => r.mean.length)
        .map(r => ({ name: r.label, colour: colourOf(r.label), values: r.mean })),
      name: "mean accuracy by method",
      format: accuracy,
    }),
  );
  const rule = said(
    "More than noise: runs of one seed are a pair, and an exact one-sided Wilcoxon signed-rank test on their differences has p of at most 0.05.",
  );
  return sectionOf(
    id,
    title,
    "test accuracy, mean ± standard deviation over seeds",
    el(
      "div",
      { class: "stack" },
      card(list, methodTable(rows), labels().length > 1 && rule),
      rows.some(r => r.mean.length) ? dots : null,
    ),
  );
}

function runTable(run) {
  const series = run.series.test_accuracy ?? {},
    names = Object.keys(run.accuracy);
  if (!names.length) return empty("No accuracy yet.");
  const first = name => there(series[name] ?? [])[0];
  const row = (name, before, now, sent, received, kind) =>
    el(
      "tr",
      { class: kind },
      el("td", { class: "l" }, name),
      el("td", {}, before == null ? "–" : accuracy(before)),
      el("td", {}, accuracy(now)),
      el(
        "td",
        { class: before == null ? "" : now >= before ? "up" : "down" },
        before == null ? "–" : `${now >= before ? "+" : "−"}${Math.abs(now - before).toFixed(3)}`,
      ),
      el("td", {}, sent),
      el("td", {}, received),
    );
  const firsts = names.map(first),
    nows = names.map(n => run.accuracy[n]);
  return scroll(
    folded(
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { class: "l" }, "node"),
            ["before", "test accuracy", "change", "sent", "received"].map(t => el("th", {}, t)),
          ),
        ),
        el(
          "tbody",
          {},
          names.map((n, i) => row(n, firsts[i], nows[i], size(run.sent[n]), size(run.received[n]))),
          row(
            "mean",
            there(firsts).length === names.length ? mean(firsts) : null,
            mean(nows),
            size(sentEach(run)),
            size(mean(names.map(n => run.received[n]))),
            "sum",
          ),
        ),
      ),
    ),
    names.length > SHOWN
      ? said(
          `${names.length} nodes, from ${accuracy(Math.min(...nows))} to ${accuracy(Math.max(...nows))}.`,
        )
      : null,
  );
}

const total = values => values.reduce((a, b) => a + b, 0);
const sentEach = run => mean(run.nodes.map(n => run.sent[n]));
const spent = run => total(run.seconds);

function methodTable(rows) {
  const nodes = [...new Set(rows.flatMap(r => Object.keys(r.nodes)))],
    shown = nodes.length <= 8 ? nodes : [];
  const columns = [...shown.map(n => [n, r => there(r.nodes[n] ?? [])]), ["mean", r => r.mean]];
  const best = columns.map(([, of]) =>
    Math.max(
      ...rows
        .map(of)
        .filter(v => v.length)
        .map(mean),
    ),
  );
  const cell = (values, top) =>
    values.length
      ? el(
          "td",
          { class: rows.length > 1 && mean(values) === top ? "best" : "" },
          accuracy(mean(values)),
          values.length > 1 && el("small", {}, `± ${spread(values).toFixed(3)}`),
        )
      : el("td", {}, "–");
  return scroll(
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { class: "l" }, "method"),
          columns.map(([name]) => el("th", {}, name)),
          ["seeds", "sent per node", "seconds"].map(t => el("th", {}, t)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map(r =>
          el(
            "tr",
            {},
            el("td", { class: "l" }, dot(r.label), r.label),
            columns.map(([, of], i) => cell(of(r), best[i])),
            el("td", {}, r.mean.length),
            el("td", {}, size(mean(runsOf(r.label).map(sentEach)))),
            el("td", {}, mean(runsOf(r.label).map(spent)).toFixed(1)),
          ),
        ),
      ),
    ),
    shown.length ? null : said(`${nodes.length} nodes: their figures are in the curves below.`),
  );
}

// ---- cost --------------------------------------------------------------------------------------

function costSection(id, title) {
  const chart = (what, y) =>
    lineChart({
      lines: visible().map(label => {
        const runs = runsOf(label);
        return {
          name: label,
          colour: colourOf(label),
          points: points(averaged(runs.map(r => r.ticks)), averaged(runs.map(r => r[what]))),
        };
      }),
      x: AXES.round,
      y,
      floor: 0,
      high: 190,
      label: `${what} by round`,
    });
  return sectionOf(
    id,
    title,
    "of one run; round 0 is what happens before the first, such as pre-training",
    el(
      "div",
      { class: "pair" },
      card(head("Seconds by round"), chart("seconds", { format: seconds, unit: " s" })),
      card(head("Bytes by round, all messages together"), chart("bytes", { format: size })),
    ),
  );
}
