"""Step times with check_finite off and on, in turns, two stages on two cores."""
import statistics, time, sys, functools
import torch
from tests.distributed.engines import batches, build, gpt_layers, section
from tests.distributed.harness import rank_pool

def job(slices, hidden, length, pairs):
    torch.set_num_threads(1)
    layers = functools.partial(gpt_layers, "float32", hidden_size=hidden, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=4*hidden, max_sequence_length=length, init_std=0.02, vocab_size=1000)
    engines = [build(layers(), section(slices=slices, check_finite=c), train_micro_batch_size_per_gpu=1) for c in ("off", "every_step")]
    data = batches(1, 2, length=length, rows=1)[0]
    times = [[], []]
    for i in range(pairs + 1):
        for k in (0, 1) if i % 2 else (1, 0):
            t = time.perf_counter(); engines[k].train_batch(iter(data)); dt = time.perf_counter() - t
            if i: times[k].append(dt)
    for e in engines: e.destroy()
    return times

if __name__ == "__main__":
    for slices, hidden, length, pairs in ((8, 256, 512, 12), (4, 512, 1024, 5)):
        res = rank_pool(2).run(job, slices=slices, hidden=hidden, length=length, pairs=pairs)
        off, on = res[0]
        ratios = [b / a for a, b in zip(off, on)]
        q = statistics.quantiles(ratios, n=4)
        print(f"slices {slices} of {length//slices} tokens, hidden {hidden}: off {statistics.median(off)*1e3:.0f} ms, on {statistics.median(on)*1e3:.0f} ms, ratio median {statistics.median(ratios):.3f} quartiles {q[0]:.3f}-{q[2]:.3f}", flush=True)
