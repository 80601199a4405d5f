"use strict";
// Sort a table by the column whose heading button is pressed; press again to turn the order around.
for (const button of document.querySelectorAll("table.sortable th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th");
    const column = heading.cellIndex;
    const body = heading.closest("table").tBodies[0];
    const falling = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) other.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
    };
    const order = (one, other) =>
      typeof one === "number" && typeof other === "number"
        ? one - other
        : String(one).localeCompare(String(other), undefined, { numeric: true });
    const rows = Array.from(body.rows, (row) => [key(row), row]);
    rows.sort((one, other) => order(one[0], other[0]) * (falling ? -1 : 1));
    body.append(...rows.map((pair) => pair[1]));
  });
}
