# syntax=docker/dockerfile:1
# The agent of one device: trains, exports, needs no open port. Build from the repository's root:
#   docker build -f deploy/docker/agent.Dockerfile -t fedcg-agent .
# For amd64 and arm64 (64-bit Raspberry Pi OS, servers), with your own registry:
#   docker buildx build --platform linux/amd64,linux/arm64 -f deploy/docker/agent.Dockerfile -t REGISTRY/fedcg-agent --push .
# Nothing below depends on the architecture: base image and all pinned packages exist for both.
# TORCH_INDEX: an index with torch wheels for this kind of machine. Default: PyTorch's CPU index, which saves several GB.
# For a Jetson: agent-jetson.Dockerfile.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/fedcg
COPY constraints.txt ./
RUN /opt/fedcg/bin/pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY . .
RUN /opt/fedcg/bin/pip install --constraint constraints.txt '.[edge,infer]'

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 fedcg \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/fedcg --create-home --shell /usr/sbin/nologin fedcg
COPY --from=build /opt/fedcg /opt/fedcg
ENV PATH=/opt/fedcg/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The bundle of `fedcg device add`, the images (both read-only), and the private store.
VOLUME ["/var/lib/fedcg"]
WORKDIR /var/lib/fedcg
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["fedcg"]
CMD ["agent", "run", "--config", "/etc/fedcg/agent.toml"]
