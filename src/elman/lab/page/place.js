// Where one is lives in the address: a view is a link.

const listeners = new Set();

export function place() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export function go(changes, quietly = false) {
  const now = { ...place(), ...changes };
  for (const name of Object.keys(now)) if (now[name] === null || now[name] === "") delete now[name];
  const hash = `#${new URLSearchParams(now)}`;
  if (hash === location.hash) return;
  if (quietly) history.replaceState(null, "", hash);
  else location.hash = hash;
}

// For when one comes back; what is too long to be kept is not.
export function remember(name, text) {
  try { sessionStorage.setItem(name, text); } catch { sessionStorage.removeItem(name); }
}

export function onMove(listener) { listeners.add(listener); }

window.addEventListener("hashchange", () => listeners.forEach((listener) => listener()));
