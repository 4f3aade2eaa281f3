"""What `vtoken serve` adds to vLLM's server: figures, a page that shows the pool, load.

    stats             scheduler process: figures of a step as integers; front end: taken apart
    snapshot          scheduler process: the pool and its requests as one JSON object
    panel             what is said at start-up
    terminal          what `vtoken top` shows
    load              many clients, or two servers in turn, through the `openai` package

The server itself is started in vtoken.engine.server; nothing here imports vLLM.
"""
