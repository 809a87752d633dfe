# verl_ext with NVIDIA GPUs (CUDA 13, x86_64). In the repository:
#   docker build -f docker/gpu.Dockerfile -t verl_ext:gpu .
#   docker run --rm --gpus all --shm-size=32g -v /shared:/shared verl_ext:gpu check recipe=dapo_math_17k/sara hardware=gpu_1x8
# With flash-attn, which has to be compiled for a long time: --build-arg FLASH_ATTN=1. Without it set
#   +actor_rollout_ref.model.override_config.attn_implementation=sdpa
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04

ARG FLASH_ATTN=0

RUN apt-get update \
    && apt-get install -y --no-install-recommends git libnuma1 python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /opt/verl_ext
COPY constraints constraints
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY recipes recipes
COPY scripts/slurm scripts/slurm
COPY verl_ext verl_ext
RUN pip install --no-cache-dir -c constraints/gpu.txt ".[gpu]"
RUN if [ "$FLASH_ATTN" = 1 ]; then pip install --no-cache-dir -c constraints/gpu.txt --no-build-isolation ".[flash-attn]"; fi

RUN useradd --create-home runner
USER runner
WORKDIR /home/runner
ENTRYPOINT ["verl-ext"]
CMD ["--help"]
