"""What `vtoken serve` adds to vLLM's server: options per request, figures, a page that shows the pool.

    request_options   `vllm_xargs` of a request -> its own budget, or a sentence why not
    stats             scheduler process: figures of a step as integers; front end: taken apart
    snapshot          scheduler process: the pool and its requests as one JSON object
    panel             what is said at start-up
    launch            options -> vLLM's own argument parser and server

Nothing here imports vLLM except `launch`, which does so when it is called.
"""
