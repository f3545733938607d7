# Three images from one file:
#   docker build --target gateway      .    no torch: about 0.3 GB
#   docker build --target worker       .    prefill and decode on CPU
#   docker build --target worker-cuda  .    prefill and decode on NVIDIA GPUs
# TORCH_INDEX is where the CPU build of torch comes from; empty means pip's default index.

FROM python:3.11-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 WEIR_HOME=/models
WORKDIR /opt/weir
RUN useradd --system --uid 10001 --create-home weir && mkdir /models && chown weir /models
COPY pyproject.toml constraints.txt README.md LICENSE deploy/requirements_of.py ./

# Dependencies first: a change of Weir's own code rebuilds only the last layers.
FROM base AS gateway
RUN python requirements_of.py gateway > /tmp/requirements.txt && pip install -c constraints.txt -r /tmp/requirements.txt
COPY weir weir
COPY protos protos
COPY gateway gateway
USER weir
EXPOSE 8000 8001
CMD ["python", "-m", "gateway"]

FROM base AS worker-base
COPY weir weir
COPY protos protos
COPY kernels kernels
COPY kv_transfer kv_transfer
COPY prefill_service prefill_service
COPY decode_service decode_service

FROM base AS worker-dependencies
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
RUN python requirements_of.py worker --without triton > /tmp/requirements.txt \
    && pip install ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} -c constraints.txt -r /tmp/requirements.txt

# The CPU kernels, for every instruction set: the image that runs them has no compiler.
FROM base AS cpu-kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY kernels kernels
RUN python -m kernels.cpu.library /opt/kernels

FROM worker-dependencies AS worker
ENV WEIR_KERNEL_CACHE_DIR=/opt/kernels
COPY --from=cpu-kernels /opt/kernels /opt/kernels
COPY --from=worker-base /opt/weir /opt/weir
USER weir
EXPOSE 9000 9100 9400
CMD ["python", "-m", "decode_service"]

FROM base AS worker-cuda
# Triton compiles its launchers with the system's C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python requirements_of.py worker > /tmp/requirements.txt && pip install -c constraints.txt -r /tmp/requirements.txt
COPY --from=worker-base /opt/weir /opt/weir
RUN mkdir /var/lib/weir && chown weir /var/lib/weir
USER weir
EXPOSE 9000 9100 9400
CMD ["python", "-m", "decode_service"]
