// The variants of an offline report.
(() => {
  const COLUMNS = [
    textColumn("id"), textColumn("kernel"), textColumn("target"), textColumn("verdict"), textColumn("reason"),
    ...data.knobs.map((knob) => numberColumn(knob)), textColumn("rest", "other knobs"),
    textColumn("instruction"), numberColumn("registers"), numberColumn("spill_bytes", "spill B"),
    numberColumn("stack_bytes", "stack B"), numberColumn("shared_bytes", "shared B"),
    numberColumn("tmem_columns", "TMEM columns"), numberColumn("blocks_per_sm", "blocks/SM"),
    numberColumn("compile_ms", "compile ms"),
  ];
  const TITLES = {
    reason: "The first reason; an opened row has all", rest: "Knobs that differ from their default, and the shape if the kernel has several",
    spill_bytes: "Bytes of spill stores and loads together", shared_bytes: "Bytes of shared memory per block",
  };

  const variants = data.rows.map((row, index) => {
    const v = { index };
    data.fields.forEach((field, i) => { v[field] = row[i]; });
    for (const name of ["shape", "schedule", "rest"]) v[name] = data.shared[v[name]];
    for (const [knob, value] of v.schedule) if (data.knobs.includes(knob)) v[knob] = value;
    v.reason = v.reasons.length ? v.reasons[0][0] : null;
    v.instruction = v.instructions && v.instructions.length ? v.instructions.join(" ") : null;
    v.spill_bytes = v.spill_store_bytes === null ? null : v.spill_store_bytes + v.spill_load_bytes;
    return v;
  });
  const linesOf = (numbers) => numbers.map((i) => data.shared[i]);

  const haystack = (v) => {
    const reasons = v.reasons.flatMap(([code, detail]) => [code, data.shared[detail]]);
    const knobs = [...v.schedule, ...v.shape].map(([name, value]) => `${name}=${value}`);
    return [v.id, v.kernel, v.target, v.verdict, v.stage, v.instruction || "", ...knobs, ...reasons,
      ...linesOf(v.warnings)].join(" ");
  };

  const fill = ({ key }, v, cell) => {
    if (key === "verdict") cell.classList.add(`verdict-${v.verdict === "accepted" ? "accepted" : "rejected"}`);
    if (key === "rest") cell.append(...wholeKnobs(v.rest));
    const more = v.reasons.length - 1;
    if (key === "reason" && more > 0) cell.append(v.reason, element("small", {}, ` +${more}`));
    return key === "rest" || (key === "reason" && more > 0);
  };

  const detail = (v) => {
    const left = element("div"), right = element("div");
    const shownLines = new Set();
    const reasons = v.reasons.map(([code, detail, numbers]) => {
      const lines = linesOf(numbers);
      lines.forEach((line) => shownLines.add(line));
      const said = element("p", {}, element("span", { className: "code" }, code), ` ${data.shared[detail]}`);
      return element("div", {}, said, ...(lines.length ? [listing(lines)] : []));
    });
    if (reasons.length) left.append(block("Rejected because", ...reasons));
    const lines = linesOf(v.lines).filter((line) => !shownLines.has(line));
    const source = "the TTGIR, the PTX and the ptxas log";
    if (lines.length) left.append(block(`${shownLines.size ? "Also in" : "Lines of"} ${source}`, listing(lines)));
    if (v.warnings.length) left.append(block("Warnings", listing(linesOf(v.warnings))));
    left.append(block("In a terminal (with --out if the report isn't in build/offline)",
      element("pre", { className: "command" }, `tune-kernels show ${v.id}`)));
    right.append(block("Schedule", pairs(v.schedule)), block("Shape", pairs(v.shape)),
      block("Reached", pairs(["stage", "spill_store_bytes", "spill_load_bytes"].map((name) => [name, v[name]]))),
      block("Digests", pairs(["kernel_digest", "artefact", "cubin_sha256"].map((name) => [name, v[name]]), "wide")));
    return [left, right];
  };

  startTable({
    items: variants, columns: COLUMNS, filters: ["kernel", "target", "verdict", "reason"], titles: TITLES,
    groupStarts: new Set(["BLOCK_N", "instruction", "compile_ms"]), haystack, fill, detail,
    nouns: ["variant", "variants"], link: "Link to this variant",
  });
})();
