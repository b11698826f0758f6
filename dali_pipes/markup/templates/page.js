"use strict";
(() => {
  const panel = document.getElementById("origin");
  const tokensOf = (row) => [...row.querySelectorAll("i")];
  const number = (text) => Number(text).toLocaleString("en-US");

  function tell(token) {
    const row = token.closest(".tokens"), piece = token.closest(".piece").dataset;
    const inPiece = tokensOf(token.closest(".piece")).indexOf(token);
    const column = Number(piece.column) + inPiece;
    const label = row.dataset.labels.split(" ")[column];
    const facts = [
      ["id", row.dataset.ids.split(" ")[column]],
      ["label", label === "-100" ? "not learned" : label],
      ["position", piece.firstPosition === undefined ? column : Number(piece.firstPosition) + inPiece],
    ];
    if (piece.document !== undefined) {
      const inside = number(Number(piece.documentOffset) + inPiece);
      facts.push(["document", `${number(piece.document)}, token ${inside} of ${number(piece.documentLength)}`]);
    }
    if (row.dataset.source !== undefined) facts.push(["source", row.dataset.source]);
    if (piece.file !== undefined) facts.push(["file", piece.file], ["offset", number(Number(piece.offset) + inPiece)]);
    panel.replaceChildren(...facts.map(([name, value]) => {
      const fact = document.createElement("span"), label = document.createElement("b");
      label.textContent = name;
      fact.append(label, ` ${value}`);
      fact.dataset.fact = name;
      return fact;
    }));
    panel.hidden = false;
  }

  function focus(token) {
    if (!token) return;
    token.tabIndex = 0;
    token.focus();
  }

  async function copy(button) {
    const row = button.closest("details").querySelector(".tokens");
    const text = button.dataset.copy === "ids" ? row.dataset.ids : tokensOf(row).map((each) => each.textContent).join("");
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      button.textContent = document.execCommand("copy") ? "Copied" : "Copying is not allowed here";
      area.remove();
      button.focus();
    }
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  for (const row of document.querySelectorAll(".tokens")) {
    const first = row.querySelector("i");
    if (first) first.tabIndex = 0;
  }
  for (const kind of ["mouseover", "focusin", "click"]) {
    document.addEventListener(kind, (event) => {
      const token = event.target.closest(".tokens i");
      if (token) tell(token);
    });
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) copy(button);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") panel.hidden = true;
    const token = event.target.closest(".tokens i");
    if (!token) return;
    const all = tokensOf(token.closest(".tokens")), at = all.indexOf(token);
    const target = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    if (all[target]) token.tabIndex = -1;
    focus(all[target]);
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
})();
