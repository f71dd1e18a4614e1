# syntax=docker/dockerfile:1
# kvserve with CUDA (default), or for CPUs with `--build-arg DEVICE=cpu`:
#
#   docker build -t kvserve .
#   docker run --gpus all --ipc=host --stop-timeout 40 -p 127.0.0.1:8000:8000 -e KVSERVE_API_KEY -v kvserve-hf:/data/huggingface kvserve \
#       --model Qwen/Qwen3-8B --policy kara --host 0.0.0.0
#
# --ipc=host (or --shm-size=8g): tensor-parallel ranks talk through shared memory, and Docker's
# default of 64 MB is too little for them. One GPU or a CPU does without. Extras of pyproject.toml:
# `--build-arg EXTRAS=ray,otel` (ray for --data-parallel-size above 1). --stop-timeout: running requests get 25 s to finish
# (--shutdown-timeout), and Docker's default of 10 s would end them.
#
# Bases by digest, for builds that can be repeated: `docker buildx imagetools inspect IMAGE` says it,
# `--build-arg CUDA_IMAGE=nvidia/cuda@sha256:...`. Packages are those of constraints-cpu.txt.
# The project's own machines have no container engine: this file is reviewed there, not built.

ARG DEVICE=cuda

ARG CUDA_IMAGE=nvidia/cuda:13.0.2-runtime-ubuntu24.04
ARG CPU_IMAGE=ubuntu:24.04

FROM ${CUDA_IMAGE} AS base-cuda
FROM ${CPU_IMAGE} AS base-cpu

# ---- builder: a virtual environment with everything in it --------------------------------------
FROM base-${DEVICE} AS builder
ARG DEVICE
ARG EXTRAS=
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/kvserve
ENV PATH=/opt/kvserve/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /src
COPY constraints-cpu.txt ./
# torch by itself: a layer of some GB that changes only with its version. PyPI's is the CUDA build.
RUN --mount=type=cache,target=/root/.cache/pip \
    torch="$(sed -n '/^torch==/p' constraints-cpu.txt)" \
    && if [ "$DEVICE" = cpu ]; then pip install --extra-index-url "$TORCH_INDEX" "$torch"; \
       else pip install "$torch"; fi
COPY pyproject.toml README.md LICENSE ./
COPY kvserve ./kvserve
COPY bench/harness ./bench/harness
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints-cpu.txt ".${EXTRAS:+[$EXTRAS]}"
# The CPU's kernels, for each level of CPUs: the image itself has no compiler. Not in /src, where
# Python would import the source and leave the kernels beside it.
WORKDIR /
RUN if [ "$DEVICE" = cpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends g++ \
        && rm -rf /var/lib/apt/lists/* \
        && python -m kvserve.kernels.prebuild; fi

# ---- runtime: Python, the environment, and what Triton needs to build its launchers ------------
FROM base-${DEVICE} AS runtime
ARG DEVICE

RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 \
    && if [ "$DEVICE" = cuda ]; then \
           apt-get install -y --no-install-recommends gcc libc6-dev python3-dev; fi \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin kvserve \
    && install -d -o kvserve -g kvserve /data/huggingface
COPY --from=builder /opt/kvserve /opt/kvserve
# `docker run --gpus all --entrypoint python -w /opt/checks kvserve -m bench.gpu_check`
COPY bench /opt/checks/bench
# KubeRay starts Ray in a login shell, which sets PATH anew.
RUN echo "PATH=/opt/kvserve/bin:\$PATH" > /etc/profile.d/kvserve.sh

ENV PATH=/opt/kvserve/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/data/huggingface
# By number: Kubernetes can tell that it is not root (runAsNonRoot).
USER 10001:10001
WORKDIR /home/kvserve
VOLUME /data/huggingface
EXPOSE 8000

# The long start period covers a model's download, loading and graph capture. Port, scheme and
# socket are those of process 1.
HEALTHCHECK --interval=15s --timeout=8s --start-period=15m --retries=3 \
    CMD ["python", "-m", "kvserve.server.cli.healthcheck"]

# Arguments after the image's name replace the ones of CMD, `--host 0.0.0.0` among them.
ENTRYPOINT ["kvserve"]
CMD ["--model", "kvserve/tiny-long", "--policy", "kara", "--host", "0.0.0.0"]
