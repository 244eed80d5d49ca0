// Search in pages that were opened as files: browsers refuse workers there, so the worker's script
// runs in a hidden frame. Material's "offline" plugin would fetch a shim like this from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      const load = (src) =>
        new Promise((done, failed) => {
          const script = inner.document.createElement("script");
          Object.assign(script, { src, onload: done, onerror: failed });
          inner.document.body.append(script);
        });
      inner.importScripts = (...urls) => urls.reduce((p, u) => p.then(() => load(u)), Promise.resolve());
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner = inner;
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
