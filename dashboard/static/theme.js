// Runs before the first paint, so that a dark page never flashes white. Not a module on purpose.
(() => {
  const KEY = "rankscope-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem(KEY);
  } catch {
    // Storage may be forbidden; then the choice holds for this page only.
  }
  const apply = () => {
    document.documentElement.dataset.theme = chosen || (system.matches ? "dark" : "light");
    document.dispatchEvent(new CustomEvent("themechange"));
  };
  window.rankscopeTheme = {
    current: () => document.documentElement.dataset.theme,
    toggle() {
      chosen = this.current() === "dark" ? "light" : "dark";
      try {
        localStorage.setItem(KEY, chosen);
      } catch {
        // As above.
      }
      apply();
    },
  };
  system.addEventListener("change", apply);
  apply();
})();
