"""The lab: a page on this machine where one trains, and watches the gradient travel through time.

    guard.py        who may come in: this machine's own page, and nobody else
    shelf.py        what lies under the root: runs by id, texts that were pasted or dropped
    loaded.py       the process that trainings are forks of
    jobs.py         trainings asked for: queued, started, told what to do
    worker.py       the process that trains one of them
    stream.py       what a run tells, as it tells it
    microscope.py   ∂L_t/∂h_{t-k} of the window that is being read
    pace.py         how often it draws
    inside.py       surprise, units, what comes next, where the state was like this before
    writing.py      text, token by token
    again.py        the command or the Python that does it again
    app.py          addresses;  serve.py: the server;  page/: what the browser gets

The page adds no mathematics: every number on it comes from a function of the library.
"""
