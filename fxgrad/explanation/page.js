// Draws an edge for each operand of each row; a closed group stands for the rows in it.
(() => {
  const graph = document.querySelector(".graph"), svg = graph.querySelector("svg");
  const rows = [...graph.querySelectorAll(".row")];

  function anchor(row) {
    let shown = row;
    for (let up = row.parentElement; up !== graph; up = up.parentElement)
      if (up.tagName === "DETAILS" && !up.open) shown = up.firstElementChild;
    return shown;
  }

  function draw() {
    const frame = graph.getBoundingClientRect(), drawn = new Set(), paths = [];
    const visible = [...new Set(rows.map(anchor))], order = new Map(visible.map((shown, i) => [shown, i]));
    const place = shown => {
      const dot = shown.querySelector(".dot").getBoundingClientRect();
      return [dot.left + dot.width / 2 - frame.left, dot.top + dot.height / 2 - frame.top];
    };
    for (const row of rows) {
      for (const name of row.dataset.from.split(" ").filter(Boolean)) {
        const source = document.getElementById("v-" + name);
        if (!source) continue;
        const from = anchor(source), to = anchor(row), key = order.get(from) + " " + order.get(to);
        if (from === to || drawn.has(key)) continue;
        drawn.add(key);
        const [x0, y0] = place(from), [x1, y1] = place(to);
        const steps = order.get(to) - order.get(from);
        const reach = steps === 1 && Math.abs(x0 - x1) < 8 ? 0 : Math.min(100, 10 + 7 * Math.sqrt(y1 - y0));
        const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
        const x = Math.min(x0, x1) - reach, bend = Math.min(30, (y1 - y0) / 2);
        path.setAttribute("d", reach === 0
          ? `M${x0} ${y0} L${x1} ${y1}`
          : `M${x0} ${y0} C${x} ${y0} ${x} ${y0} ${x} ${y0 + bend} L${x} ${y1 - bend} C${x} ${y1} ${x} ${y1} ${x1} ${y1}`);
        path.setAttribute("class", (source.className.match(/batched|uniform|mixed/) || [""])[0]);
        path.ends = [from, to];
        paths.push(path);
      }
    }
    svg.replaceChildren(...paths);
  }

  function light(event) {
    const shown = event.target.closest(".row, summary");
    for (const path of svg.children) path.classList.toggle("lit", path.ends.includes(shown));
  }

  function reveal() {
    const found = location.hash && document.getElementById(location.hash.slice(1));
    for (let up = found; up && up !== graph; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
    if (found) found.scrollIntoView({ block: "center" });
  }

  let due = 0;  // opening all groups is one drawing, not one for each
  function soon() {
    cancelAnimationFrame(due);
    due = requestAnimationFrame(draw);
  }

  graph.addEventListener("toggle", soon, true);
  graph.addEventListener("mouseover", light);
  graph.addEventListener("mouseleave", light);
  addEventListener("resize", soon);
  addEventListener("hashchange", reveal);
  for (const button of document.querySelectorAll("[data-open]"))
    button.onclick = () => graph.querySelectorAll("details").forEach(group => (group.open = !!button.dataset.open));
  reveal();
  draw();
})();
