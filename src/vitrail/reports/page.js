"use strict";
// Sortable tables: click a column title (or press Enter or Space on it) to sort; again to reverse the order.
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
      // Numbers start in descending, names in ascending order.
      const before = head.getAttribute("aria-sort");
      const ascending = before ? before === "descending" : !isNumber;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const rows = [...body.rows].sort((one, other) => {
        const [a, b] = [keyOf(one, column), keyOf(other, column)];
        if (!isNumber) return (ascending ? 1 : -1) * a.localeCompare(b, undefined, { numeric: true });
        // Cells without a number stay at the end in both orders.
        const [x, y] = [parseFloat(a), parseFloat(b)];
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return ascending ? x - y : y - x;
      });
      body.append(...rows);
    });
  });
}
// Wide tables show a shadow on the side where content is hidden.
for (const scroller of document.querySelectorAll(".scroller")) {
  const box = scroller.querySelector(".box");
  const update = () => {
    const hidden = box.scrollWidth - box.clientWidth;
    scroller.classList.toggle("wider", hidden > 1);
    scroller.classList.toggle("more-left", box.scrollLeft > 1);
    scroller.classList.toggle("more-right", hidden - box.scrollLeft > 1);
  };
  box.addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe(box);
  update();
}
// Print collapsed details, too.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
