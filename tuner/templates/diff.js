// The rows of a difference. Words come from the data; drawings are made here.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLUMNS = [
    textColumn("kernel"), textColumn("shape"), ...(data.targets > 1 ? [textColumn("target")] : []),
    textColumn("status"), textColumn("knobs", "schedule"),
    textColumn("artefact"),
    ...(data.promoted ? [textColumn("drawn", "times"), numberColumn("ratio", "change"), textColumn("time", "verdict"),
      textColumn("bits_words", "bits"), textColumn("evidence")] : []),
    ...(data.notes ? [textColumn("notes", "other changes")] : []),
    textColumn("refused", "check"),
  ];
  const TITLES = {
    knobs: "The changed knobs, or the whole schedule if none changed", ratio: "New time over old, with its 95% interval",
    refused: "Whether --check refuses the row", drawn: "Old above, new below, on one scale; sorts by the new median", bits_words: "The numerics class of the output",
  };
  const FILTERS = ["status", "kernel", "target", "became", "time", "bits", "evidence", "refused"].filter((name) => byId(name));

  const items = data.rows.map((row, index) => ({
    ...row, index, drawn: row.times[1] ? row.times[1].median : null,
  }));

  const haystack = (v) => [v.id, v.kernel, v.shape, v.target, v.status, v.schedule, ...v.knobs,
    ...v.schedules.map(([knob, old, now]) => `${knob}=${v.status === "removed" ? old : now}`), ...v.artefact, ...v.notes,
    v.time_words, v.bits_words, v.evidence, ...v.evidence_words.flat(), ...v.findings.flat()].join(" ");

  // ---- distributions ----

  const svg = (tag, attributes, ...children) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };

  const extent = (times) => {
    const all = times.filter(Boolean).flatMap((t) => [...t.quantiles, ...t.interval, t.median]);
    const low = Math.min(...all), high = Math.max(...all), margin = (high - low || high || 1) * 0.04;
    return [low - margin, high + margin];
  };

  // One distribution as a strip. Quantiles are evenly spaced: a narrow gap has as many samples as a wide one and is shaded
  // darker. The median is a line, its interval a bar.
  const strip = (times, side, top, height, at) => {
    const q = times.quantiles;
    const gaps = q.slice(1).map((value, i) => [q[i], value]);
    const narrowest = Math.min(...gaps.map(([a, b]) => at(b) - at(a)).filter((w) => w > 0));
    const shades = gaps.map(([a, b]) => svg("rect", {
      x: at(a), y: top, width: Math.max(at(b) - at(a), 0.3), height, opacity: Math.max(0.12, Math.min(1, narrowest / (at(b) - at(a) || narrowest)) * 0.6),
    }));
    const [low, high] = times.interval;
    return svg("g", { class: side }, ...shades,
      svg("rect", { class: "interval", x: at(low), y: top + height * 0.36, width: Math.max(at(high) - at(low), 0.6), height: height * 0.28 }),
      svg("rect", { class: "median", x: at(times.median) - 0.6, y: top - 1, width: 1.2, height: height + 2 }));
  };

  const drawing = (v, width, height, axis) => {
    const [low, high] = extent(v.times);
    const at = (value) => Math.round(((value - low) / (high - low)) * width * 100) / 100;
    const bottom = axis ? 14 : 0;
    const each = (height - bottom) / 2;
    const shapes = v.times.flatMap((t, i) => (t ? [strip(t, i ? "new" : "old", i * each + 2, each - 4, at)] : []));
    const labels = axis ? [[low, "start", 0], [(low + high) / 2, "middle", width / 2], [high, "end", width]].map(([value, anchor, x]) =>
      svg("text", { x, y: height - 2, "text-anchor": anchor }, `${value.toPrecision(4)} µs`)) : [];
    const said = v.times.map((t, i) => (t ? `${i ? "new" : "old"} ${t.words}` : "")).filter(Boolean).join(", ");
    return svg("svg", { class: "strip", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": said },
      ...shapes, ...labels);
  };

  // ---- cells ----

  const lines = (cell, parts) => parts.forEach((part, i) => cell.append(...(i ? [element("br")] : []), part));
  const fill = ({ key }, v, cell) => {
    if (key === "status") cell.classList.add(`status-${v.status}`);
    if (key === "time") cell.classList.add(`time-${v.time.replace(" ", "-")}`);
    if (key === "evidence" && v.evidence) {
      const state = element("span", { className: `evidence-${v.evidence}` }, v.evidence);
      cell.append(state, ...(v.random ? [" ", element("span", { className: "random" }, "random weights")] : []));
    } else if (key === "knobs") {
      const said = v.knobs.length ? v.knobs : [v.schedule];
      said.forEach((knob, i) => cell.append(...(i ? [element("br")] : []), ...wholeKnobs(knob)));
    } else if (key === "artefact") lines(cell, v.artefact.length ? v.artefact : [element("span", { className: "quiet" }, v.whole)]);
    else if (key === "notes") lines(cell, v.notes);
    else if (key === "drawn" && v.times.some(Boolean)) cell.append(drawing(v, 120, 26, false));
    else if (key === "ratio") lines(cell, v.ratio === null ? [] : v.time_words.slice(v.time.length + 1).split(/ (?=\[)/));
    else if (key === "refused" && v.findings.length) {
      lines(cell, [...new Set(v.findings.map(([code]) => code))]);
    } else return false;
    return true;
  };

  const sides = (rows) => {
    const head = element("tr", {}, ...["", "old", "new"].map((name) => element("th", { scope: "col" }, name)));
    const body = rows.map(([name, old, now]) => element("tr", { className: old === now ? "" : "differs" },
      element("th", { scope: "row" }, name), element("td", {}, shown(old)), element("td", {}, shown(now))));
    return element("table", { className: "sides" }, element("thead", {}, head), element("tbody", {}, ...body));
  };

  const codeBlock = (code) => {
    const marked = (sign, className) => (line) => element("span", { className }, `${sign} ${line}`);
    const pre = element("pre", {}, ...code.counts.map((line) => element("span", {}, `${line} instructions`)),
      ...code.old.map(marked("-", "minus")), ...code.new.map(marked("+", "plus")),
      ...code.notes.map((line) => element("span", {}, line)));
    return block("Lines of code that changed", pre);
  };

  const detail = (v) => {
    const left = element("div"), right = element("div");
    const said = v.findings.map(([code, why]) => element("p", {}, element("span", { className: "code" }, code), ` ${why}`));
    if (said.length) left.append(block("Refused by --check because", ...said));
    if (v.times.some(Boolean)) {
      const legend = v.times.map((t, i) => [i ? "new" : "old", t ? `${t.words}, ${t.samples} samples` : null]);
      left.append(block(`Times${v.basis ? `, ${v.basis}` : ""}`, drawing(v, 480, 74, true), pairs([...legend, ["verdict", v.time_words]], "wide-words")));
    }
    if (v.code) left.append(codeBlock(v.code));
    left.append(block("Schedule", sides(v.schedules)), block("Artefact", sides(v.facts)));
    if (v.evidence_words.length) {
      const list = pairs(v.evidence_words, "wide-words");
      if (v.random) list.firstElementChild.classList.add("marked");
      right.append(block(`Evidence: ${v.evidence}`, list));
    }
    const classes = v.classes.some(Boolean) ? [["numerics class", ...v.classes]] : [];
    right.append(block("Sides", sides([...v.sides, ...classes])), block("Toolchain", sides(v.toolchain)));
    return [left, right];
  };

  startTable({
    items, columns: COLUMNS, filters: FILTERS, titles: TITLES, groupStarts: new Set(["knobs", "drawn", "refused"]), haystack,
    fill, detail, nouns: ["row", "rows"], link: "Link to this row",
  });
})();
