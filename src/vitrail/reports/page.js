"use strict";
// Tables: a click on a title, or Enter and Space on it, sorts by that column; again, the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.key ?? cell.textContent.trim();
  };
  heads.forEach((head, column) => {
    const isNumber = head.classList.contains("number");
    head.querySelector("button").addEventListener("click", () => {
      // Numbers begin with the largest, names with the first.
      const before = head.getAttribute("aria-sort");
      const upwards = before ? before === "descending" : !isNumber;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", upwards ? "ascending" : "descending");
      const rows = [...body.rows].sort((one, other) => {
        const [a, b] = [keyOf(one, column), keyOf(other, column)];
        if (!isNumber) return (upwards ? 1 : -1) * a.localeCompare(b, undefined, { numeric: true });
        // What has no number stays at the end, whichever way.
        const [x, y] = [parseFloat(a), parseFloat(b)];
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return upwards ? x - y : y - x;
      });
      body.append(...rows);
    });
  });
}
// What is wider than its box says so, with a shadow at the side where more is hidden.
for (const scroller of document.querySelectorAll(".scroller")) {
  const box = scroller.querySelector(".box");
  const look = () => {
    const hidden = box.scrollWidth - box.clientWidth;
    scroller.classList.toggle("wider", hidden > 1);
    scroller.classList.toggle("more-left", box.scrollLeft > 1);
    scroller.classList.toggle("more-right", hidden - box.scrollLeft > 1);
  };
  box.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(box);
  look();
}
// What is folded away on the screen is printed.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
