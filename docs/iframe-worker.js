// The search of a page that is opened as a file, where browsers start no worker: its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.worker = this
      frame.srcdoc = `<script>
        self.postMessage = data => frameElement.worker.dispatchEvent(new MessageEvent("message", {data}))
      <\/script><script src="${new URL(url, location)}"><\/script>`
      frame.onload = () => {
        this.send = data => frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}))
        this.waiting.forEach(this.send)
      }
      document.body.append(frame)
      this.frame = frame
    }
    postMessage(data) {
      if (this.send) this.send(data)
      else this.waiting.push(data)
    }
    terminate() { this.frame.remove() }
  }
}
