// Puts the parts together, and draws again when the window, the colour scheme or the medium changes.
const chart = new BatchChart(byId("batches"), (index) => timeline.select(index));
const timeline = new StepTimeline(byId("timeline"), byId("tip"), (index) => {
  showDetail(index);
  chart.draw(index);
});
const redraw = () => { timeline.draw(); chart.draw(); };

showFacts();
showStages();
showModes();
showRequests((index) => timeline.select(index));
timeline.draw();
const failed = steps.findIndex((step) => step.failed);
timeline.select(Math.max(failed, 0), { reveal: false });
if (!steps.length) showDetail(0);

const actions = {
  previous: () => timeline.select(timeline.selected - 1), next: () => timeline.select(timeline.selected + 1),
  in: () => timeline.zoom(0.6), out: () => timeline.zoom(1 / 0.6), fit: () => timeline.fit(),
};
for (const button of document.querySelectorAll("[data-do]")) {
  button.addEventListener("click", () => actions[button.dataset.do]());
}
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
// Paper is white whatever the screen is.
window.addEventListener("beforeprint", () => { document.documentElement.classList.add("paper"); timeline.fit(); redraw(); });
window.addEventListener("afterprint", () => { document.documentElement.classList.remove("paper"); redraw(); });
