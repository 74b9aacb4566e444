"""A progress that ends a merge as Ctrl-C does."""


class InterruptAfter:
    """Interrupted after some items; `finished` names them."""

    def __init__(self, items):
        self.items = items
        self.finished = []

    def start(self, total):
        pass

    def advance(self, what, size, *, resumed=False):
        self.finished.append(what)
        if len(self.finished) == self.items:
            raise KeyboardInterrupt

    def finish(self):
        pass
