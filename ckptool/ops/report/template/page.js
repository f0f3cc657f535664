"use strict";
(async () => {
  const began = performance.now();
  const items = JSON.parse(document.getElementById("charts").textContent);
  const views = [];
  for (const [target, item] of Object.entries(items)) {
    views.push(await Bokeh.embed.embed_item(item, target));
  }
  const milliseconds = performance.now() - began;
  document.getElementById("drawn").textContent = `${views.length} charts drawn in ${milliseconds.toFixed(0)} ms.`;

  // The charts of the timeline hold both numbers of each step; this says which one goes along the axis.
  const showAlong = (field) => {
    for (const model of Bokeh.documents.flatMap((page) => page.roots())) {
      for (const renderer of model.renderers ?? []) {
        if (renderer.name === "timeline") {
          renderer.glyph.x = { field };
        }
      }
      if ((model.renderers ?? []).some((renderer) => renderer.name === "timeline")) {
        model.below[0].axis_label = field === "step" ? "step" : "data position";
      }
    }
    document.documentElement.dataset.along = field;
  };
  for (const choice of document.querySelectorAll('input[name="along"]')) {
    choice.addEventListener("change", () => showAlong(choice.value));
  }
})();
