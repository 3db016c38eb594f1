"""vLLM as the engine of a worker: `--engine vllm`.

vLLM schedules, computes and keeps KV; everything around it is Moonpool's: the worker's protocol, placement and
admission, token streams, failover with equal tokens, reports.

    engine_args    Moonpool's settings and `--vllm-args` -> vLLM's arguments; versions (vllm is imported on demand)
    keyed_sampler  Moonpool's sampling as a logits processor, inside vLLM's processes
    requests       a request -> vLLM's sampling parameters; vLLM's outputs -> tokens and log-probabilities
    runner         AsyncLLM as the worker's engine
    engine, node   the worker around it
    connector      inside vLLM: copies between its blocks and slots, of a worker or of a KV agent
    agent          the KV agent of a stock vLLM, which served_vllm starts and asks from inside vLLM's scheduler
"""
