"""What `python -m benchmarks.bench_gpu` measures: stages, their runs, and the figures of a run."""
