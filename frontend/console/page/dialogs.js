// Confirmation dialogs and the dialog for the admin key. One dialog at a time; Escape closes it.
import { h, say } from "./dom.js";
import { hasKey, holdKey } from "./api.js";

function open(build) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" });
    const close = (result) => {
      dialog.close();
      dialog.remove();
      before?.focus?.();
      resolve(result);
    };
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      close(null);
    });
    dialog.append(...build(close, dialog));
    document.body.append(dialog);
    dialog.showModal();
  });
}

// `act` runs while the dialog is open, which shows its error. Resolves with the result of `act`, or null.
export function confirm({ title, consequence, details = [], verb, act, grave = false }) {
  return open((close) => {
    const outcome = h("p", { class: "outcome bad", role: "alert", hidden: true });
    const cancel = h("button", { type: "button", onclick: () => close(null) }, "Cancel");
    const go = h("button", { type: "button", class: grave ? "grave" : "main" }, verb);
    go.addEventListener("click", async () => {
      go.disabled = cancel.disabled = true;
      outcome.hidden = true;
      try {
        const done = (await act()) ?? true;
        close(done);
      } catch (error) {
        outcome.textContent = `Failed: ${error.message}`;
        outcome.hidden = false;
        go.disabled = cancel.disabled = false;
        go.focus();
      }
    });
    return [
      h("h2", { id: "dialog-title" }, title),
      ...[consequence].flat().map((text) => h("p", null, text)),
      details.length ? h("ul", { class: "notes" }, details.map((text) => h("li", null, text))) : h("span"),
      outcome,
      h("div", { class: "buttons" }, cancel, go),
    ];
  });
}

// Resolves with true once a key is set.
export function askKey(canAct) {
  return open((close) => {
    const input = h("input", { type: "password", autocomplete: "off", spellcheck: "false", id: "key-input", required: true });
    const form = h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          const text = input.value.trim();
          if (!text) return;
          holdKey(text);
          say("The admin key is used until this page is closed.");
          close(true);
        },
      },
      h("p", null, h("label", { for: "key-input" }, "Admin API key")),
      input,
      h("p", { class: "note" }, "The key is stored in this page's memory only; closing or reloading the page discards it."),
      canAct
        ? null
        : h("p", { class: "note" }, "No admin key is configured here. Create one with ", h("code", null, "moonpool keys new --admin"), ", and add its entry to the file given by ", h("code", null, "--api-keys-file"), "; it takes effect within seconds."),
      h(
        "div",
        { class: "buttons" },
        hasKey()
          ? h("button", { type: "button", onclick: () => (holdKey(""), say("The admin key was removed."), close(true)) }, "Remove the key")
          : null,
        h("button", { type: "button", onclick: () => close(null) }, "Cancel"),
        h("button", { type: "submit", class: "main" }, "Use this key"),
      ),
    );
    return [h("h2", { id: "dialog-title" }, "Admin key"), form];
  });
}
