# rlhf for NVIDIA GPUs: `docker build -t rlhf .` in this folder. It has compilers, since
# Triton and torch compile kernels in a run.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/rlhf
ENV PATH=/opt/rlhf/bin:$PATH
RUN pip install --no-cache-dir torch==2.13.0

COPY core /src/core
COPY plugins /src/plugins
RUN pip install --no-cache-dir \
    /src/core \
    /src/plugins/kernels \
    /src/plugins/demo \
    /src/plugins/distill \
    /src/plugins/rollouts \
    /src/plugins/rows \
    /src/plugins/optim \
    /src/plugins/deepspeed \
    /src/plugins/sft \
    /src/plugins/dpo \
    /src/plugins/rm \
    /src/plugins/kd \
    /src/plugins/kto \
    /src/plugins/prm \
    /src/plugins/grpo \
    /src/plugins/ppo \
    /src/plugins/migrate \
    /src/plugins/tools \
    /src/plugins/serve \
    /src/plugins/tensorboard

WORKDIR /work
ENTRYPOINT ["rlhf"]
