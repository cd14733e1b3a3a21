# One image for every process; which one it is, the command says: docker run handoff:gpu router
#
#   docker build -t handoff:gpu .                       NVIDIA GPU
#   docker build -t handoff:cpu --build-arg TORCH=cpu . no GPU
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH=gpu
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
ENV PATH=/opt/handoff/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# The compiler is for shared/kv/copy_rows.c alone, and stays behind in this stage.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/handoff

# torch first, in a layer of its own: it is nearly all of the image and changes rarely
COPY requirements.lock requirements-gpu.lock ./
RUN case "$TORCH" in \
      gpu) pip install -c requirements-gpu.lock torch setuptools ;; \
      cpu) pip install -c requirements.lock --extra-index-url "$CPU_INDEX" torch setuptools ;; \
      *) echo "TORCH is gpu or cpu, not $TORCH" >&2; exit 1 ;; \
    esac \
    && python -c "import sys, torch; sys.exit((torch.version.cuda is not None) != ('$TORCH' == 'gpu'))"

COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY services services
COPY router router
COPY loadtest loadtest
RUN if [ "$TORCH" = gpu ]; then lock=requirements-gpu.lock; else lock=requirements.lock; fi \
    && pip install --no-build-isolation -c "$lock" .

FROM python:${PYTHON}
RUN useradd --uid 10001 --create-home handoff \
    && install --directory --owner=handoff --group=handoff --mode=0700 /cache /run/handoff
COPY --from=build /opt/handoff /opt/handoff
ENV PATH=/opt/handoff/bin:$PATH \
    HANDOFF_CACHE_DIR=/cache \
    HF_HOME=/cache/huggingface \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER handoff
WORKDIR /home/handoff
EXPOSE 8000
# Exec form: the process gets SIGTERM itself and drains.
ENTRYPOINT ["handoff"]
CMD ["--help"]
