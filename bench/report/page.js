// Draws the plots, and lets the legends and the choices of memory change them.
"use strict";

const specs = JSON.parse(document.getElementById("plots").textContent);
const views = new Map(); // from the element that holds it
for (const container of document.querySelectorAll("[data-plot]")) {
  const options = { renderer: "svg", actions: false, logLevel: 1 };
  vegaEmbed(container, specs[container.dataset.plot], options)
    .then(({ view }) => views.set(container, view));
}

function tell(section, name, value) {
  for (const [container, view] of views)
    if (section.contains(container)) view.signal(name, value).runAsync();
}

// The plots and the rows of a table are those of the schemes that are ticked.
function choose(section) {
  const ticked = section.querySelectorAll(".legend input:checked");
  const shown = [...ticked].map((box) => box.value);
  tell(section, "shown", shown);
  for (const row of section.querySelectorAll("[data-scheme]"))
    row.hidden = !shown.includes(row.dataset.scheme);
}

const sections = document.querySelectorAll("section");
sections.forEach(choose);

document.addEventListener("change", ({ target }) => {
  if (target.matches(".legend select"))
    tell(target.closest("section"), "memory", target.value);
  if (!target.matches(".legend input")) return;
  for (const box of document.querySelectorAll(".legend input"))
    if (box.value === target.value) box.checked = target.checked;
  sections.forEach(choose);
});

document.addEventListener("click", ({ target }) => {
  if (!target.matches(".legend button")) return;
  for (const box of document.querySelectorAll(".legend input")) box.checked = true;
  sections.forEach(choose);
});
