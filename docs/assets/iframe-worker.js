/* Browsers start no workers in pages that are opened from the disk. There the search runs in a hidden frame, which has the
   same two calls: messages go in as `message` events of the frame, and come out as `message` events of this object. */
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.waiting = []
      const attach = () => {
        document.body.append(this.frame)
        const inside = this.frame.contentWindow
        const page = inside.document
        inside.importScripts = (...urls) => Promise.all(urls.map(one => this.load(page, one)))
        this.load(page, url).then(() => {
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          this.ready = inside
          this.waiting.splice(0).forEach(data => this.postMessage(data))
        })
      }
      document.body ? attach() : addEventListener("DOMContentLoaded", attach)
    }
    load(page, url) {
      return new Promise((done, failed) => {
        const script = page.createElement("script")
        script.src = url
        script.onload = done
        script.onerror = failed
        page.body.append(script)
      })
    }
    postMessage(data) {
      if (!this.ready) return void this.waiting.push(data)
      this.ready.dispatchEvent(new this.ready.MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker = FrameWorker
}
