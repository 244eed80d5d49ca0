// Sections about one run: who worked when, the method's own, maps, ledger, settings.

function workSection(id, title) {
  const run = current(),
    round = circle(run);
  const parts = [card(timeline(run)), round && card(round)];
  return sectionOf(id, title, run.topology, el("div", { class: "side" }, parts));
}

function ownSection(id, title) {
  const run = current(),
    cards = run.matrices.map(matrix);
  if (run.network) cards.push(card(head("Who shares which slices"), sheet(run.network)));
  cards.push(...unlabelled(run));
  if (!cards.length) return null;
  return sectionOf(
    id,
    title,
    run.about ? `${run.method}: ${run.about}` : run.method,
    el("div", { class: cards.length > 1 ? "pair" : "stack" }, cards),
  );
}

// FedUL: the loss on the nodes' sets, that on the hub's labels; and all runs against each other.
function unlabelled(run) {
  const onSets = run.series.local_loss,
    onLabels = run.series.val_rb_loss;
  if (!onLabels?.hub || !onSets) return [];
  const lines = [
    ["on the nodes' sets", averaged(Object.values(onSets)), 0],
    ["on the hub's labels", onLabels.hub, 1],
  ].map(([name, row, i]) => ({
    name,
    colour: colour(i),
    points: points(kept(run, run.ticks), row),
  }));
  const cards = [
    card(
      head("The two losses"),
      el(
        "span",
        { class: "chips" },
        lines.map(l => key(l.colour, l.name)),
      ),
      lineChart({
        lines,
        x: AXES.round,
        y: { format: figure, unit: "" },
        label: "two losses by round",
      }),
    ),
  ];
  const ends = data.runs.map(frontPoint).filter(Boolean);
  if (ends.length > 1)
    cards.push(
      card(
        head("The front between the two losses"),
        frontChart(ends, "loss on the nodes' sets", "loss on the hub's labels"),
        said(
          "A point a run, of the network that its nodes keep; filled points are beaten by no other in both losses.",
        ),
      ),
    );
  return cards;
}

function frontPoint(run) {
  const onSets = Object.values(run.final.surrogate_loss ?? {}),
    right = run.series.val_rb_accuracy?.hub,
    loss = run.series.val_rb_loss?.hub;
  if (!onSets.length || !right || !loss) return null;
  const best = Math.max(...there(right)),
    at = right.lastIndexOf(best);
  return {
    name: `${run.label}, seed ${run.seed}`,
    x: mean(onSets),
    y: loss[at],
    colour: colourOf(run.label),
  };
}

function mapsSection(id, title) {
  const found = current().maps;
  if (!found) return null;
  if (!found.panels.length) return sectionOf(id, title, "", card(empty(found.said)));
  const about = `${found.said} A point is a sample; only who is near whom has a meaning.`;
  return sectionOf(
    id,
    title,
    about,
    el(
      "div",
      { class: "trio" },
      found.panels.map(panel => card(head(panel.title), scatter(panel))),
    ),
  );
}

function sheet(text) {
  const host = el("div", { class: "sheet" });
  host.innerHTML = text;
  return host;
}

function holdsSection(id, title) {
  return sectionOf(
    id,
    title,
    "",
    el(
      "div",
      { class: "stack" },
      data.tasks.map(task =>
        card(
          head(`${task.name}, seed ${task.seed}`),
          task.svg ? sheet(task.svg) : empty(task.said),
          task.svg && task.said ? said(task.said) : null,
        ),
      ),
    ),
  );
}

function ledgerSection(id, title) {
  const run = current();
  return sectionOf(
    id,
    title,
    "everything that left a node, to whom, which tensors, how many bytes",
    el(
      "div",
      { class: "stack" },
      run.ledger.messages ? card(leftEach(run)) : null,
      card(ledger(run)),
    ),
  );
}

function settingsSection(id, title) {
  const run = current();
  const copied = text =>
    el(
      "div",
      { class: "copy" },
      el("pre", {}, text),
      el(
        "button",
        {
          type: "button",
          class: "copier",
          onclick: event =>
            navigator.clipboard?.writeText(text).then(() => {
              event.target.textContent = "copied";
            }),
        },
        "copy",
      ),
    );
  const all =
    data.commands.length && data.runs.length > 1
      ? card(head("All of it again"), data.commands.map(copied))
      : null;
  const one = card(
    head(data.runs.length > 1 ? `${run.label}, seed ${run.seed}` : "The line that repeats it"),
    run.command
      ? copied(run.command)
      : empty("Nodes of your own: only the program that made them can repeat this run."),
    el(
      "div",
      { class: "columns" },
      run.settings.map(g => described(g.name, g.values)),
      described("environment", run.environment),
      described("folder", [["run", run.folder]]),
    ),
  );
  return sectionOf(id, title, "", el("div", { class: "stack" }, all, one));
}

function described(name, values) {
  return el(
    "div",
    {},
    el("h3", {}, name),
    el(
      "dl",
      {},
      values.map(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, value)]),
    ),
  );
}
